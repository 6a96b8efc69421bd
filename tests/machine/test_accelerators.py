"""The table of accelerators: names that drivers give, and figures that can be true of dense arithmetic."""

from __future__ import annotations

import pytest

from saturate.machine import accelerators

#: What drivers, torch and traces call devices -> the row.
NAMES = {
    "Tesla V100-SXM2-16GB": "NVIDIA V100 SXM2 16GB", "Tesla V100-DGXS-32GB": "NVIDIA V100 SXM 32GB",
    "Tesla V100-PCIE-32GB": "NVIDIA V100 PCIe 32GB", "Tesla V100S-PCIE-32GB": "NVIDIA V100S PCIe 32GB",
    "Tesla T4": "NVIDIA T4",
    "NVIDIA A100-SXM4-40GB": "NVIDIA A100 SXM 40GB", "NVIDIA A100-SXM4-80GB": "NVIDIA A100 SXM 80GB",
    "A100-SXM-80GB": "NVIDIA A100 SXM 80GB", "NVIDIA A100-PCIE-40GB": "NVIDIA A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "NVIDIA A100 PCIe 80GB", "NVIDIA A10": "NVIDIA A10", "NVIDIA A30": "NVIDIA A30",
    "NVIDIA A40": "NVIDIA A40", "NVIDIA RTX A6000": "NVIDIA RTX A6000",
    "NVIDIA H100 80GB HBM3": "NVIDIA H100 SXM", "NVIDIA H100 PCIe": "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL": "NVIDIA H100 NVL",
    "NVIDIA H200": "NVIDIA H200 SXM", "NVIDIA H200 NVL": "NVIDIA H200 NVL", "NVIDIA GH200 480GB": "NVIDIA GH200 96GB",
    "NVIDIA B200": "NVIDIA B200", "NVIDIA GB200": "NVIDIA GB200", "NVIDIA L4": "NVIDIA L4",
    "NVIDIA L40": "NVIDIA L40",
    "NVIDIA L40S": "NVIDIA L40S", "NVIDIA RTX 6000 Ada Generation": "NVIDIA RTX 6000 Ada",
    "NVIDIA GeForce RTX 3060": "NVIDIA RTX 3060", "GeForce RTX 3090": "NVIDIA RTX 3090",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "NVIDIA RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4090": "NVIDIA RTX 4090",
    "NVIDIA GeForce RTX 5090": "NVIDIA RTX 5090", "AMD Instinct MI250X": "AMD MI250X (one of two dies)",
    "AMD Instinct MI300X": "AMD MI300X", "AMD Instinct MI300X VF": "AMD MI300X", "AMD Instinct MI325X": "AMD MI325X",
    "AMD Instinct MI355X": "AMD MI355X",
}
#: Half precision with fp32 accumulation: multiply-add operations per unit and clock. Sources: the vendors' white
#: papers.
PER_CLOCK = {
    "Volta": 1024, "Turing": 1024, "Ampere": 2048, "GeForce Ampere": 512, "Ada": 1024, "GeForce Ada": 512,
    "Hopper": 4096, "Blackwell": 8192, "GeForce Blackwell": 512, "CDNA 2": 1024, "CDNA 3": 2048, "CDNA 4": 4096,
}
#: Of its architecture, but with another chip inside.
EXCEPTIONS = {"NVIDIA A10": 1024, "NVIDIA A40": 1024, "NVIDIA RTX A6000": 1024, "NVIDIA L40": 512}


@pytest.mark.parametrize("name", NAMES)
def test_the_names_that_drivers_give(name):
    found = accelerators.find(name)
    assert found is not None and found.name == NAMES[name]


@pytest.mark.parametrize("name", [
    "", "NVIDIA", "NVIDIA NVIDIA", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D", "NVIDIA A10G", "NVIDIA H100", "GRID T4-8Q", "NVIDIA GeForce RTX 2080 Ti",
    "AMD Instinct MI300A", "cpu", "(",
])
def test_similar_names_are_not_taken_for_it(name):
    assert accelerators.find(name) is None


def geforce() -> dict[str, str]:
    """Drivers call these by their row's name, without the memory that tells versions apart."""
    rows = [spec.name for spec in accelerators.table() if spec.architecture.startswith("GeForce")]
    return {f"NVIDIA GeForce {row.removeprefix('NVIDIA ').removesuffix(' 10GB')}": row for row in rows}


def test_every_geforce_is_found_by_its_name():
    assert len(geforce()) > 20
    assert {name: accelerators.find(name).name for name in geforce()} == geforce()


def test_no_name_means_two_devices():
    for name in [*NAMES, *geforce()]:
        plain = accelerators._VENDORS.sub("", accelerators._VENDORS.sub("", name))
        assert sum(spec.pattern.fullmatch(plain) is not None for spec in accelerators.table()) == 1, name


@pytest.mark.parametrize("spec", accelerators.table(), ids=lambda spec: spec.name)
def test_figures_are_dense_and_fit_each_other(spec):
    """The clock that the half-precision rate implies must be one that chips have; a sparse figure implies twice
    that."""
    per_clock = EXCEPTIONS.get(spec.name, PER_CLOCK[spec.architecture])
    clock = spec.rates["float16"] / (spec.units * per_clock)
    # An L4 of 72 W reaches its clock for moments only, and its data sheet says so by stating it.
    assert 1.2e9 < clock < 2.75e9, f"{clock / 1e9:.2f} GHz"
    assert spec.rates.get("bfloat16", spec.rates["float16"]) == spec.rates["float16"]
    if "float8" in spec.rates:
        assert spec.rates["float8"] == pytest.approx(2 * spec.rates["float16"], rel=0.02)
    if "tfloat32" in spec.rates:
        assert spec.rates["tfloat32"] == pytest.approx(spec.rates["float16"] / 2, rel=0.02)
    vector = 64 if spec.architecture in ("Volta", "Turing") or "A100" in spec.name or "A30" in spec.name else 128
    if spec.vendor == "NVIDIA":
        assert 1.2e9 < spec.rates["float32"] / (spec.units * vector * 2) < 2.8e9
    assert 2e11 < spec.bandwidth < 1e13 and 5 * 10**9 < spec.memory_bytes < 4 * 10**11 and 50 < spec.watts < 2000
    assert spec.sources
    assert all(source.startswith("https://") and (".nvidia.com/" in source or ".amd.com/" in source)
               for source in spec.sources)


def test_rates_are_per_second_and_links_are_read():
    h100 = accelerators.find("NVIDIA H100 80GB HBM3")
    assert h100.rates["bfloat16"] == 989.4e12 and h100.bandwidth == 3.35e12
    assert h100.units == 132 and h100.link == 9e11
    assert (h100.pcie_generation, h100.pcie_lanes) == (5, 16)
    t4 = accelerators.find("Tesla T4")
    assert t4.link is None and "tfloat32" not in t4.rates and "bfloat16" not in t4.rates
    assert accelerators.find("NVIDIA GB200").pcie_generation is None


def test_an_altered_figure_is_seen():
    """The check above can fail: the sparse rate of an H100, a half and a doubled one."""
    spec = accelerators.find("NVIDIA H100 80GB HBM3")
    for factor in (0.5, 2.0):
        altered = {name: rate * factor if name == "float16" else rate for name, rate in spec.rates.items()}
        with pytest.raises(AssertionError):
            test_figures_are_dense_and_fit_each_other(spec.__class__(**{**spec.__dict__, "rates": altered}))
