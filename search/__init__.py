"""The search for the best plan of a model on a cluster: its degrees, labels, stages and schedule.

`driver` runs the search over the candidates of `space`. It uses the lower bounds of `bounds`, the prices of `pricing`
and the labels of `labels`. The best plans are in `result`, the data of a report in `explain`. The search may import
`autopar.cost_model`, `autopar.capture`, `autopar.rules` and `autopar.ir`, never `autopar.runtime`.

A search memoises in objects that live as long as the search. Each keeps its results in a dict. Its constructor takes
every other input, so the key of the dict is complete.

    SearchLabels     labels and block costs by tensor degree, for one program, cluster and setting of regather
                     (`autopar.planning.labels`)
    Together         exact prices by candidate and cut, for one goal; its `Prepared` by devices and tensor degree
    SharedPrices     prices that candidates of one tensor degree share, by row of blocks and place of ranks
    Prepared.runs    replayed pipelines, by schedule, stages, micro-batches and seconds of passes
    labels Known     boundaries of blocks, and solved first mesh dimensions, by all their inputs

Pure functions of small values, such as `divisors` and the partition into stages, are memoised by `functools` instead.
Nothing else outlives a search, except the files of `autopar.cache.store`.
"""
