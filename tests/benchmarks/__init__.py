"""Long runs that are no tests, and are not installed: `python -m tests.benchmarks.<name>`.

=============  =====================================================================================
`workloads`    what is measured: operators, layers and models as torch modules
`peers`        other compilers on a workload
`rows`         one workload by us and by the peers: compiled, checked, timed
`run`          the suites, with `python -m tests.benchmarks`; their results are `record` and `table`
`symbolic`     programs compiled once, at several sizes (`real_models`, `tensor_parallel`: models)
`plans`        graphs by key, all their plans, and launches for the learned cost model
`tuning`       what tuning gains, beside MetaSchedule, on several servers, and when it is killed
`golden`       digests of what is compiled
`neighbours`   torch's operators and our calls in turns
`readme`       results as the README shows them
=============  =====================================================================================
"""
