"""Plan: what a backend decided to run. The Plan IS the compile key: a kernel sees only its Plan and its operands."""

from dataclasses import asdict, dataclass

from .mask import FULL, Mask
from .problem import DENSE


@dataclass(frozen=True)
class Tile:
    tile_m: int  # query rows of a CTA
    tile_n: int  # keys of one step
    stages: int = 2  # K/V ring slots (Triton: num_stages)
    warps: int = 0  # MMA warps; 0 = follows from tile_m
    votes: bool = False  # a warp votes whether O needs rescaling at all
    late: bool = False  # O is rescaled under the next scores, not at once
    ahead: int = 0  # exponentials before the wait for P V (of a row) or dP (of a thread), at least; 0: as ptxas likes
    skips: bool = False  # a warpgroup leaves out a tile of which the diagonal hides all that is its own
    halves: bool = False  # and computes half of one whose other half is hidden
    triples: bool = False  # row maxima as integers, three operands at a time
    early: bool = False  # of a backward: LSE and delta are loaded before the waits for S and dP, not after
    under: bool = False  # of a backward: dV leaves under the last products of dK, not after

    def __str__(self) -> str:
        words = [f"{self.tile_m}x{self.tile_n} stages={self.stages}"]
        words += [
            name for name in ("votes", "late", "skips", "halves", "triples", "early", "under") if getattr(self, name)
        ]
        words += [f"ahead={self.ahead}"] if self.ahead else []
        return " ".join(words)


@dataclass(frozen=True)
class Plan:
    backend: str
    direction: str  # "forward" or "backward"
    arch: str  # compile target: "sm_90a", "sm_100a", "8.0" for Triton, "" where nothing is compiled
    dtype: str
    head_dim: int  # as tiled: rounded up, so that one kernel serves every true head_dim under it
    head_dim_v: int
    mask: Mask = FULL
    lse: bool = False
    lse_grad: bool = False
    deterministic: bool = False
    ieee_float32: bool = True
    tile: Tile | None = None
    softcap: bool = False  # scores are capped: softcap * tanh(score / softcap)
    ctas: int = 0  # CTAs of a persistent kernel at most: the GPU's multiprocessors times what fits one; 0 = none
    draws: bool = False  # CTAs draw query tiles from a counter, which the kernel takes last
    form: str = DENSE  # how sequences lie in the operands, see backend.py
    page_size: int = 0  # of a paged cache
    chosen: bool = False  # cache_batch_idx is given; a backend whose kernels take None either way leaves it False
    appends: bool = False  # k_new and v_new are given; likewise
    variant: str = ""  # names a different schedule under the same backend

    @property
    def plain(self) -> bool:
        """Does the kernel take the scale alone, and no bound or cap at run time? See the contract in backend.py."""
        return not self.mask.windowed and not self.softcap

    def key(self) -> str:
        """A stable text of every field, for the disk cache."""
        return repr(sorted(asdict(self).items()))

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"({self.head_dim},{self.head_dim_v})"
        words = [self.backend, self.direction, self.arch, self.dtype, f"d={dims}", str(self.mask)]
        words += [f"tile {self.tile}"] if self.tile else []
        words += [self.form] if self.form != DENSE else []
        words += [f"page_size={self.page_size}"] if self.page_size else []
        words += [name for name in ("chosen", "appends") if getattr(self, name)]
        words += ["softcap"] if self.softcap else []
        words += ["lse"] if self.lse and self.direction == "forward" else []
        words += ["drawn"] if self.draws else []
        words += ["dlse"] if self.lse_grad else []
        words += ["deterministic"] if self.deterministic and self.direction == "backward" else []
        words += [self.variant] if self.variant else []
        return " ".join(w for w in words if w)
