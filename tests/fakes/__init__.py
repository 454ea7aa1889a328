"""Fakes of AWS in memory, for tests and benchmarks. Contract tests compare them with real implementations."""
