# SPDX-License-Identifier: Apache-2.0
"""Runs a peer's tests, of a checkout, with cpx in the peer's place.

Where there are GPUs, ranks are what the test makes them: processes, over NCCL. Elsewhere they are threads with tensors
on the CPU: torch's own process group of threads carries what the test itself sends, cpx's what cpx sends.
"""

import argparse
import importlib.util
import os
import pathlib
import sys
import threading
import types

import pytest
import torch
import torch.distributed as dist

import cpx
import cpx.torch

_own = threading.local()  # comm and generator of the thread that is a rank
_chosen = []  # options of pytest that say which tests


class TorchOnCpu:
    """What a test finds as `torch` where there is no GPU: every device is the CPU, every thread draws for itself."""

    cuda = types.SimpleNamespace(device_count=lambda: 8, set_device=lambda rank: None, current_device=lambda: "cpu")

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def device(name):
        return torch.device("cpu")

    @staticmethod
    def manual_seed(seed):
        _own.generator = torch.Generator().manual_seed(seed)

    @staticmethod
    def randn(*size, **options):
        return torch.randn(*size, generator=getattr(_own, "generator", None), **options)


def has_gpus():
    return torch.cuda.device_count() > 0


def in_threads(ranks, program):
    """Runs program(rank) on as many threads, each a rank of a process group of threads and of one of cpx."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    torch.set_num_threads(1)  # each rank would have as many of its own, and they wait for each other spinning
    store, found = dist.HashStore(), cpx.torch.communicator
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    cpx.torch.communicator = lambda group=None: _own.comm

    def member(comm):
        _own.comm = found(comm)
        dist.init_process_group("threaded", rank=comm.rank, world_size=ranks, store=store)
        try:
            return program(comm.rank)
        except BaseException as e:
            threaded.ProcessLocalGroup.exception_handle(e)
            raise

    try:
        return cpx.run(ranks, member)
    finally:
        cpx.torch.communicator = found
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()


def on_cpu(module):
    """Lets a test module, whose workers it starts by torch.multiprocessing, run in threads on the CPU."""

    def start(worker, args=(), nprocs=1, **_):
        in_threads(nprocs, lambda rank: worker(rank, *args))

    module.torch = TorchOnCpu()
    module.init_distributed = lambda rank, ranks: None
    module.cleanup_distributed = lambda: None
    module.mp = types.SimpleNamespace(start_processes=start)


def load(path, name):
    """Returns a file of a checkout as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Put:
    """Has `patch` change every module of tests before its tests run, and prints what comes of each."""

    def __init__(self, patch, differs):
        self.patch, self.differs, self.tests, self.failed, self.uncollected = patch, differs, 0, 0, 0

    def pytest_collection_finish(self, session):
        for module in {item.module for item in session.items}:
            self.patch(module)

    def pytest_collectreport(self, report):
        """What did not come to tests: a file that cannot be imported here, say, or wants a module that is not there."""
        if report.outcome != "passed":
            self.failed += report.failed
            lines = [line for line in str(report.longrepr).strip().split("\n") if line.startswith("E ")]
            why = report.longrepr[2] if report.skipped else (lines or [str(report.longrepr)])[-1].removeprefix("E ")
            print(f"{report.outcome:8}{report.nodeid.split('/')[-1]}: {why.strip()}", flush=True)
            self.uncollected += 1

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        name, outcome, reason = report.nodeid.split("/")[-1], report.outcome, ""
        if report.skipped:
            reason = report.longrepr[2]
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else str(report.longrepr)).strip().split("\n")
            reason = lines[0] if crash and "ProcessRaised" not in lines[0] else lines[-1]  # what the process raised
            said = [line for line in report.capstdout.split("\n") if "ailed" in line]
            reason = "; ".join([reason, *said])
            otherwise = next((why for begin, why in self.differs.items() if begin in name), None)
            if otherwise:
                outcome, reason = "differs", otherwise
        self.tests += 1
        self.failed += outcome == "failed"
        print(f"{outcome:8}{name}, {report.duration:.1f} s" + (f": {reason}" if reason else ""), flush=True)


def run(checkout, files, patch, differs=None):
    """Runs files of tests, prints a line each and returns how many failed, files that are no tests here among them.

    differs: of tests that want what cpx does otherwise, by a part of their name, what it does.
    """
    put = _Put(patch, differs or {})
    options = [*_chosen, "--continue-on-collection-errors", "--noconftest", "-c", os.devnull]
    options += ["-p", "no:cacheprovider", "-p", "no:terminal"]
    paths = [str(checkout / f) for f in files]
    pytest.main([*options, f"--rootdir={checkout}", "--import-mode=importlib", *paths], plugins=[put])
    found = put.tests + put.uncollected
    if found == 0:
        print("failed  no test was found")
    return put.failed + (found == 0)


def report(name, program):
    """Runs program, prints whether it passed and returns 1 if not."""
    try:
        program()
    except (Exception, SystemExit) as e:
        print(f"failed  {name}: {e}")
        return 1
    print(f"passed  {name}")
    return 0


def checkout_of_arguments(text):
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("checkout", type=lambda p: pathlib.Path(p).resolve(strict=True))
    parser.add_argument("-k", metavar="EXPRESSION", help="of its files of tests, those whose names match, as pytest's")
    arguments = parser.parse_args()
    checkout = arguments.checkout
    _chosen.extend(["-k", arguments.k] if arguments.k else [])
    sys.path.insert(0, str(checkout))
    where = f"{torch.cuda.device_count()} GPUs" if has_gpus() else "ranks as threads, on the CPU"
    print(f"torch {torch.__version__}, {where}")
    return checkout
