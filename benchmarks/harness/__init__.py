"""What the benchmarks share: sample data, options, runs over seeds, timing, tables and plots."""
