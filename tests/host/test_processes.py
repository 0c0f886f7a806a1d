"""Processes and modes around a call: fork while locks are held, spawn, inference mode."""

import multiprocessing
import os
import threading

import pytest
import torch

from cute_flash import attention
from cute_flash.runtime import compiler, diskcache, report

from .. import cold_start
from ..fakes import FakeBackend

pytestmark = pytest.mark.usefixtures("office")

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


def qkv(dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 9, 4, 16, generator=generator).to(dtype).requires_grad_(requires_grad) for _ in "qkv")


def answer(results, *options):
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    results.put(attention(*qkv(), *options).sum().item())


def in_a_child(context, target=answer, *arguments):
    """What a child puts into a queue; TimeoutError's cousin queue.Empty where it hangs."""
    results = context.Queue()
    process = context.Process(target=target, args=(results, *arguments))
    process.start()
    try:
        return results.get(timeout=60)
    finally:
        process.kill()
        process.join()


@pytest.fixture
def elsewhere():
    """elsewhere(lock): another thread holds it until the test ends."""
    done, threads = threading.Event(), []

    def hold(lock):
        taken = threading.Event()

        def work():
            with lock:
                taken.set()
                done.wait(60)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        taken.wait(60)

    yield hold
    done.set()
    for thread in threads:
        thread.join()


def test_a_fork_while_another_thread_compiles(elsewhere):
    """The child has no such thread: whoever waited for its locks would wait for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for lock in (compiler._table, compiler._compiling, report._lock):
            elsewhere(lock)
        got = in_a_child(FORK)
    finally:
        torch.set_num_threads(threads)
    assert got == pytest.approx(attention_alone(), rel=1e-5)


def attention_alone():
    q, k, v = (x.double().transpose(1, 2) for x in qkv())
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().item()


def take(results, root):
    with diskcache.locked(root, "key"):
        results.put("taken")


def wait_for(results, release):
    results.put("forked")
    release.wait(60)


@pytest.mark.parametrize("parent", ["leaves the lock", "still holds it"])
def test_a_fork_while_a_cache_key_is_locked(tmp_path, parent):
    """flock belongs to the open file, which parent and child share."""
    release, results = FORK.Event(), FORK.Queue()
    with diskcache.locked(tmp_path, "key"):
        child = FORK.Process(target=wait_for, args=(results, release))
        child.start()
        assert results.get(timeout=60) == "forked"
        if parent == "still holds it":
            with pytest.raises(BlockingIOError):
                lock_at_once(tmp_path)
    lock_at_once(tmp_path)  # the child lives on, and does not hold it
    assert child.is_alive()
    release.set()
    child.join()
    assert in_a_child(FORK, take, tmp_path) == "taken"


def lock_at_once(root):
    import fcntl

    with open(root / "key.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_spawned_process_gives_the_same_answer():
    assert in_a_child(SPAWN) == pytest.approx(attention(*qkv()).sum().item(), rel=1e-5)  # one thread there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_mode(dtype):
    """Cold and warm, before and after other modes: the same numbers, and no graph."""
    inputs = qkv(dtype, requires_grad=True)
    expected = attention(*inputs)
    for _ in range(2):
        with torch.inference_mode():
            out, lse = attention(*inputs, return_lse=True)
            assert out.is_inference() and not out.requires_grad
            assert torch.equal(out, expected)
            inner = attention(*(x * 1 for x in inputs))  # inference tensors themselves
        assert torch.equal(inner, expected) and lse.shape == (2, 4, 9)
        assert attention(*inputs).requires_grad


def test_gradients_of_inference_tensors_are_refused_by_torch_and_leave_no_trace():
    with torch.inference_mode():
        q = qkv()[0] * 1
    k = qkv(requires_grad=True)[1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
            attention(q, k, k)
        assert torch.equal(attention(q.clone(), k, k), attention(q.clone(), k, k))


def test_a_kernel_compiled_in_inference_mode_serves_training(backends):
    (backend,) = backends(FakeBackend("sm90"))
    q, k, v = qkv(torch.bfloat16)
    with torch.inference_mode():
        attention(q, k, v, return_lse=True)
    attention(q.requires_grad_(), k, v, return_lse=True)
    assert [plan.direction for plan in backend.built] == ["forward"]


@pytest.mark.slow  # eight imports of torch
def test_a_cold_start_of_eight_processes_compiles_once_a_key(tmp_path):
    """New processes, as the ranks of a training are; tests/device has the same of a GPU's kernels."""
    pytest.importorskip("cutlass")
    environment = {**os.environ, "CUTE_FLASH_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    cold_start.check(cold_start.together(8, environment, "host"), tmp_path)
