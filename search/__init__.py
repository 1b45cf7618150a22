"""The search for the best plan of a model on a cluster: its degrees, labels, stages and schedule.

`driver` runs the search over the candidates of `space`. It uses the lower bounds of `bounds`, the prices of `pricing`
and the labels of `labels`. The best plans are in `result`, the data of a report in `explain`. The search may import
`autopar.cost_model`, `autopar.capture`, `autopar.rules` and `autopar.ir`, never `autopar.runtime`.

A search keeps results in one way, with a `Memo`. `autopar.memo` has the rule for its keys, and for all other results
that are kept in memory.

    labels     `autopar.planning.labels.SearchLabels` has a memo of labels and block costs
    prices     `autopar.search.pricing.batch.Together` has a memo of prepared candidates and replayed pipelines

Nothing else outlives a search, except `functools` caches of functions of small values, and the files of
`autopar.cache.store`.
"""
