"""What layouts run on: device profiles, links, collectives, engines, and the one `Machine` that holds them.

It imports no other room of the cost model.
"""
