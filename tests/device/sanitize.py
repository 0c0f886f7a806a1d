"""A short list of calls for compute-sanitizer: odd lengths, head dims and layouts, forward and backward.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.device.sanitize

Without the caching allocator each tensor is its own allocation, so that a read past its end is seen. Answers are
checked as well: a wrong one exits with 1.
"""

import argparse
import warnings

import torch

import tests.conftest  # noqa: F401  makes cute_flash importable from a bare tree
from tests.cases import Case, make_inputs

SHAPES = (
    Case(1, 1, 1, 1, 1, 64, 64),
    Case(2, 65, 127, 4, 1, 64, 64, causal=True),
    Case(1, 129, 63, 2, 2, 128, 128, causal=True),
    Case(1, 200, 333, 7, 1, 80, 80),
    Case(1, 130, 130, 2, 1, 96, 96, causal=True),
    Case(1, 130, 190, 2, 1, 192, 128),
    Case(2, 100, 65, 2, 1, 256, 256, causal=True),
    Case(1, 70, 90, 2, 1, 33, 33),
    Case(2, 96, 96, 4, 4, 64, 64, layout="packed"),
    Case(2, 96, 96, 2, 2, 64, 64, layout="every_second_row"),
    Case(1, 96, 96, 2, 2, 64, 64, layout="offset"),
    Case(1, 128, 256, 2, 1, 128, 128, dtype="float16", causal=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="sm90,triton", help="comma-separated")
    parser.add_argument("--forward-only", action="store_true")
    arguments = parser.parse_args()

    from tests.runner import Runner  # imports the package

    warnings.simplefilter("ignore")
    wrong = 0
    for backend in arguments.backends.split(","):
        for case in SHAPES:
            inputs = make_inputs(case, "cuda")
            run = Runner(torch.device("cuda", 0), case.torch_dtype, backend)
            try:
                run.check(*inputs.qkv, causal=case.causal)
                if not arguments.forward_only and case.seqlen_k > 1:
                    run.check_gradients(*inputs.qkv, inputs.dout, causal=case.causal)
            except AssertionError as error:
                wrong += 1
                print(f"WRONG {backend} {case}: {error}", flush=True)
            else:
                print(f"ok {backend} {case}", flush=True)
    torch.cuda.synchronize()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
