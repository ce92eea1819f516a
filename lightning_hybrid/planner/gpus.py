"""What the makers say of their accelerators, in one table. Pure.

[Note: sources]
Peak rates (dense: half of what is printed with sparsity), memory, power and links are those of the makers' documents:

- NVIDIA data sheets: "V100" (SXM2, PCIe; SXM3 and V100S by their product briefs), "T4", "A10", "A10G" (Amazon's card:
  less than an A10), "A30", "A40", "A100 80GB" and "A100" (40 GB), "A800", "L4", "L40", "L40S", "RTX A5000",
  "RTX A6000", "RTX 6000 Ada", "H100" (SXM, PCIe; NVL by its product brief), "H800", "H20", "H200" (SXM, NVL),
  "GH200", "HGX B200", "GB200 NVL72", "HGX B300", "GB300 NVL72";
- NVIDIA whitepapers "Ampere GA102", "Ada" and "RTX Blackwell" (GeForce: fp16 with fp32 accumulation);
- AMD data sheets: Instinct MI210, MI250X (one is two devices to a program: numbers are those of one GCD), MI300X,
  MI325X, MI350X, MI355X;
- torchtitan's benchmarks of December 2024 for Meta's H100 with 96 GB (HBM2e at 2.4 TB/s, 500 W).

The rows of B300, GB300, MI350X, MI355X and H100 NVL were compared (2026-11) with published descriptions only, not with
the makers' own sheets: peaks, memory, bandwidth and power agree; the number of a B300's multiprocessors is a B200's.

TPUs and other accelerators that NCCL or RCCL does not drive are not here. ``matmul`` is the share of the peak that the
best bf16 matrix product reaches, as measured for many shapes by stas00/ml-engineering,
``compute/accelerator/README.md`` ("Maximum Achievable Matmul FLOPS", commit b9e2972); ``None`` where nobody measured,
then :data:`UNMEASURED_MATMUL` counts. Links are one direction of one device. The network is what such nodes usually
have (DGX and HGX reference designs, public clouds); a cluster says its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_hybrid.errors import ConfigurationError

__all__ = ["COOL", "GPUS", "PRECISIONS", "Gpu", "find_gpu", "unlisted_gpu"]

#: Share of the peak of the best matrix product where none was measured: between an H100's 0.80 and an MI325X's 0.60.
UNMEASURED_MATMUL = 0.75
#: Watts for each TFLOP/s (16 bits) of an A100, which holds its clock in training.
COOL = 400 / 312


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of device. Rates are decimal: TFLOP/s, GB/s, Gbit/s."""

    name: str
    tflops: Mapping[str, float]
    """Dense peak by data type (``fp32``, ``fp16``, ``bf16``, ``fp8``)."""
    memory: float
    """GiB."""
    bandwidth: float
    """GB/s of the device's own memory."""
    link: float
    """GB/s of one device to the others of its node, one direction."""
    wiring: str = "switch"
    """Who has the whole ``link``: any two (``switch``), only all together (``mesh``: a wire to each other one;
    ``cube``: to some of them one or two), or those who use it in turn (``bus``: PCIe)."""
    network: float
    """Gbit/s to other nodes, one device's share."""
    multiprocessors: int
    watts: float
    """What the device may draw."""
    per_node: int = 8
    """Devices that reach each other over ``link`` (72 on an NVL72 rack)."""
    matmul: float | None = None
    """Share of the peak that the best bf16 matrix product reaches; ``None`` if nobody measured."""
    matmul_fp8: float | None = None
    host: bool = False
    """Whether it is a CPU: no driver, kernels and communicators take of its memory."""
    fast_attention: float = 0.6
    """Share of the best matrix product's rate that flash attention reaches: the second version's kernels are written
    for Ampere; on Blackwell cuDNN's and the fourth's are usual."""

    def peak(self, dtype: str) -> float:
        """FLOP/s at a data type; types that the device lacks run at the next wider one it has."""
        for name in _WIDER[dtype]:
            if name in self.tflops:
                return self.tflops[name] * 1e12
        raise ConfigurationError(f"{self.name} has no rate for {dtype}; it has {', '.join(self.tflops)}.")

    def sustained(self, dtype: str) -> float:
        """FLOP/s of the best matrix product."""
        share = self.matmul or UNMEASURED_MATMUL
        if dtype == "fp8" and "fp8" in self.tflops:
            share = self.matmul_fp8 or 0.9 * share
        return self.peak(dtype) * share


_WIDER = {
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "fp32": ("fp32",),
}
#: Data types of matrix products that the planner knows.
PRECISIONS = tuple(_WIDER)


_TABLE = """
name              fp16 bf16  fp32    fp8 GiB GB/s link wiring network node units watts matmul matmul8 flash
A100-SXM-80GB      312  yes  19.5      -  80 2039  300 switch     200    8   108   400  0.869       -   0.6
A100-SXM-40GB      312  yes  19.5      -  40 1555  300 switch     200    8   108   400  0.869       -   0.6
A800-SXM-80GB      312  yes  19.5      -  80 2039  200 switch     200    8   108   400  0.869       -   0.6
A100-PCIe-80GB     312  yes  19.5      -  80 1935   32    bus     100    8   108   300  0.811       -   0.6
A100-PCIe-40GB     312  yes  19.5      -  40 1555   32    bus     100    8   108   300  0.811       -   0.6
H100-SXM-80GB    989.4  yes    67 1978.8  80 3352  450 switch     400    8   132   700  0.803   0.709   0.5
H100-SXM-96GB    989.4  yes    67 1978.8  96 2400  450 switch     400    8   132   500      -       -   0.5
H100-PCIe-80GB     756  yes    51   1512  80 2039   64    bus     100    8   114   350  0.803   0.709   0.5
H800-SXM-80GB    989.4  yes    67 1978.8  80 3352  200 switch     400    8   132   700  0.803   0.709   0.5
H20-SXM-96GB       148  yes    44    296  96 4000  450 switch     400    8    78   400      -   0.709   0.5
H200-SXM-141GB   989.4  yes    67 1978.8 141 4800  450 switch     400    8   132   700  0.803   0.709   0.5
GH200-96GB       989.4  yes    67 1978.8  96 4000  150 switch     200    4   132   900  0.836   0.776   0.5
B200-SXM-180GB    2250  yes    75   4500 180 7700  900 switch     400    8   148  1000      -       -   0.7
GB200-186GB       2500  yes    80   5000 186 8000  900 switch     400   72   148  1200      -       -   0.7
V100-SXM2-32GB     125   no  15.7      -  32  900  150   cube      50    8    80   300      -       -   0.6
V100-SXM2-16GB     125   no  15.7      -  16  900  150   cube      50    8    80   300      -       -   0.6
V100-SXM3-32GB     130   no  16.3      -  32  980  150 switch      50   16    80   350      -       -   0.6
A40-48GB         149.7  yes  37.4      -  48  696   32    bus     100    8    84   300      -       -   0.6
A6000-48GB       154.8  yes  38.7      -  48  768   32    bus     100    8    84   300      -       -   0.6
A10-24GB           125  yes  31.2      -  24  600   32    bus     100    8    72   150      -       -   0.6
L4-24GB            121  yes  30.3    242  24  300   32    bus     100    8    58    72      -       -   0.6
L40S-48GB          362  yes  91.6    724  48  864   32    bus     100    8   142   350      -       -   0.6
RTX4090-24GB     165.2  yes  82.6  330.4  24 1008   32    bus     100    8   128   450      -       -   0.6
RTX3090-24GB        71  yes  35.6      -  24  936   32    bus     100    8    82   350      -       -   0.6
MI210-64GB         181  yes  22.6      -  64 1638   32    bus     100    8   104   300      -       -   0.6
MI250X-GCD-64GB  191.5  yes  23.9      -  64 1638  150   mesh     100    8   110   280  0.767       -   0.4
MI300X-192GB    1307.4  yes 163.4 2614.8 192 5300  448   mesh     400    8   304   750  0.514       -   0.5
MI325X-256GB    1307.4  yes 163.4 2614.8 256 6000  448   mesh     400    8   304  1000  0.604       -   0.5
A800-PCIe-80GB     312  yes  19.5      -  80 1935   32    bus     100    8   108   300      -       -   0.6
H100-NVL-94GB    835.5  yes    60   1671  94 3938   64    bus     100    8   132   400      -       -   0.5
H800-PCIe-80GB     756  yes    51   1512  80 2039   64    bus     100    8   114   350      -       -   0.5
H200-NVL-141GB   835.5  yes    60   1671 141 4800   64    bus     100    8   132   600      -       -   0.5
GH200-144GB      989.4  yes    67 1978.8 144 4900  150 switch     200    4   132   900  0.836   0.776   0.5
B300-SXM-270GB    2250  yes    75   4500 270 8000  900 switch     800    8   148  1100      -       -   0.7
GB300-279GB       2500  yes    80   5000 279 8000  900 switch     800   72   148  1400      -       -   0.7
V100-PCIe-32GB     112   no    14      -  32  900   16    bus      50    8    80   250      -       -   0.6
V100-PCIe-16GB     112   no    14      -  16  900   16    bus      50    8    80   250      -       -   0.6
V100S-PCIe-32GB    130   no  16.4      -  32 1134   16    bus      50    8    80   250      -       -   0.6
T4-16GB             65   no   8.1      -  16  320   16    bus      50    8    40    70      -       -   0.6
A30-24GB           165  yes  10.3      -  24  933   32    bus     100    8    56   165      -       -   0.6
A10G-24GB           70  yes  31.5      -  24  600   32    bus     100    8    72   300      -       -   0.6
L40-48GB           181  yes  90.5    362  48  864   32    bus     100    8   142   300      -       -   0.6
A5000-24GB       111.1  yes  27.8      -  24  768   32    bus     100    8    64   230      -       -   0.6
RTX6000Ada-48GB  364.2  yes  91.1  728.5  48  960   32    bus     100    8   142   300      -       -   0.6
RTX5090-32GB     209.5  yes 104.8    419  32 1792   64    bus     100    8   170   575      -       -   0.6
MI350X-288GB      2307  yes 144.2   4614 288 8000  537   mesh     400    8   256  1000      -       -   0.5
MI355X-288GB      2517  yes 157.3   5033 288 8000  537   mesh     400    8   256  1400      -       -   0.5"""


def _read(line: str, columns: list[str]) -> Gpu:
    """One line of the table."""
    cells = dict(zip(columns, line.split(), strict=True))
    numbers = {name: None if cell == "-" else float(cell) for name, cell in cells.items() if _is_number(cell)}
    rates = {name: numbers.get(name) for name in ("fp16", "fp32", "fp8")}
    rates["bf16"] = rates["fp16"] if cells["bf16"] == "yes" else None
    return Gpu(
        name=cells["name"],
        tflops={name: rate for name, rate in rates.items() if rate is not None},
        wiring=cells["wiring"],
        multiprocessors=int(cells["units"]),
        per_node=int(cells["node"]),
        fast_attention=float(cells["flash"]),
        memory=float(cells["GiB"]),
        bandwidth=float(cells["GB/s"]),
        link=float(cells["link"]),
        network=float(cells["network"]),
        watts=float(cells["watts"]),
        matmul=numbers["matmul"],
        matmul_fp8=numbers["matmul8"],
    )


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).isdigit()


def _read_table() -> tuple[Gpu, ...]:
    head, *lines = _TABLE.strip().splitlines()
    return tuple(_read(line, head.split()) for line in lines)


GPUS = _read_table()
#: Other names of the same or nearly the same.
_SAME = {"4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090", "mi250": "mi250x", "mi300": "mi300x"}
_SAME |= {"rtxa6000": "a6000", "rtxa5000": "a5000"}


def find_gpu(name: str) -> Gpu:
    """Return the device that ``name`` means: ``"H100"``, ``"A100-40GB"``, ``"NVIDIA H100 80GB HBM3"``, ``"8xA100"``.

    Of several that a name may mean it is the one with most words in common; without more words, the first of the table.

    Raises:
        ConfigurationError: if none is meant, or a part of one (MIG); the message lists those known.
    """
    words = _words(name)
    known = [gpu for gpu in GPUS if _kind(gpu) in words]
    if "mig" in words or not known:
        what = f"{name!r} is a part of a device" if known else f"No data of a device {name!r}; known are {_NAMES}"
        raise ConfigurationError(
            f"{what}. Measure it (lightning-hybrid probe), say its rate and memory (plan --peak TFLOPS --memory GIB),"
            " or describe it in a JSON file (Cluster.from_json, plan --cluster)."
        )
    return max(known, key=lambda gpu: len(words & _words(gpu.name)))


def unlisted_gpu(name: str, peak: float, memory: float) -> Gpu:
    """Return a device of which no more is known: the rest is as usual for its rate (a card on PCIe).

    Args:
        name: As people call it.
        peak: Dense TFLOP/s of 16-bit matrix products.
        memory: GiB.
    """
    return Gpu(
        name=name,
        tflops={"bf16": peak, "fp16": peak, "fp32": peak / 8},
        memory=memory,
        bandwidth=5 * peak,
        link=32.0,
        wiring="bus",
        network=100.0,
        multiprocessors=100,
        watts=COOL * peak,
    )


def _kind(gpu: Gpu) -> str:
    return gpu.name.partition("-")[0].lower()


_KINDS = frozenset(map(_kind, GPUS))
_NAMES = ", ".join(gpu.name for gpu in GPUS)


def _words(name: str) -> set[str]:
    """``"NVIDIA A100-SXM4-80GB"`` -> nvidia, a100, sxm, 80."""
    text = re.sub(r"\b(\d+)\s*gi?b?\b", r"\1", name.lower())
    text = re.sub(r"\bsxm[456]\b", "sxm", text)
    text = re.sub(r"\brtx[ -]*(6000)?[ -]*ada\b", "rtx6000ada", text)
    text = re.sub(r"\brtx[ -]+", "rtx", text)
    text = re.sub(r"\b\d+ *x *(?=[a-z])", "", text)  # 8xA100
    return {_known_word(word) for word in re.findall(r"[a-z0-9]+", text)}


def _known_word(word: str) -> str:
    word = _SAME.get(word, word)
    return word[:-1] if word.endswith("s") and word not in _KINDS and word[:-1] in _KINDS else word
