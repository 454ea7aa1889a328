"""Provides measurements that describe an idle machine, for the tests of the benchmarks."""

from benchmarks.machine import Machine

MACHINE = Machine(
    processor="P",
    cores=2,
    memory_gib=8.0,
    kernel="Linux 6",
    python="3.11",
    versions={"torch": "2.13.0", "deepspeed": "0.19.8", "moto": "5.2.5"},
    load_average=(0.96, 0.2, 0.345),
)
