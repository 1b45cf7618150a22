"""Reading and writing files: strict YAML and pydantic models that name every problem, plain JSON data, atomic writes.

May import `autopar.errors` only.
"""
