"""The kernels, one folder per GPU architecture, best first. Importing this imports no compiler."""

from .reference.backend import BACKEND as REFERENCE
from .sm90.backend import BACKEND as SM90
from .sm100.backend import BACKEND as SM100
from .triton.backend import BACKEND as TRITON

BACKENDS = (SM100, SM90, TRITON, REFERENCE)
