"""From a model, a cluster and a request to a plan or an estimate: given degrees, searched degrees, or a price.

Imports everything that decides (`autopar.capture`, `cost_model`, `search`, `report`), and `autopar.runtime` only for
types.
"""
