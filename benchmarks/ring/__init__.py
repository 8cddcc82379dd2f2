"""Parts of ``benchmarks.bench_ring``: rings and baselines, on real ranks or on ranks played on one device."""
