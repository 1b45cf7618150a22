"""The search for the best plan: which degrees, labels, stages and schedule a model should train with on a cluster.

`driver` runs it over the candidates of `space`, with the lower bounds of `bounds`, the prices of `pricing` and the
labels of `labels`; `result` holds what it found and `explain` the data of a report. It may import `autopar.cost_model`,
`autopar.capture`, `autopar.rules` and `autopar.ir`, never `autopar.runtime`.

How a search memoises: an object that lives as long as the search keeps what it computed in a dict, and its constructor
takes every other input, so that the key is whole.

    SearchLabels     labels and block costs by tensor degree, for one program, cluster and setting of regather
                     (`autopar.planning.labels`)
    Together         exact prices by candidate and cut, for one goal; its `Prepared` by devices and tensor degree
    SharedPrices     what candidates of one tensor degree share, by row of blocks and place of ranks
    Prepared.runs    replayed pipelines, by schedule, stages, micro-batches and seconds of passes
    labels Known     boundaries of blocks, and solved first mesh dimensions, by everything that they depend on

Pure functions of small values, such as `divisors` and the partition into stages, are memoised by `functools` instead.
Nothing else outlives a search; files that do are the subject of `autopar.cache.store`.
"""
