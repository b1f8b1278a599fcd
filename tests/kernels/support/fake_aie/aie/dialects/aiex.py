"""Stand-in for the aiex dialect."""

from __future__ import annotations

from aie.dialects.aie import LINES


def runtime_sequence(*inputs, sym_name=None, context=None):
    def region(body):
        LINES.append(f"aie.runtime_sequence @{sym_name}")
        body(*range(len(inputs)))

    return region


def npu_load_pdi(*, device_ref):
    LINES.append(f"aiex.npu.load_pdi {{device_ref = @{device_ref}}}")


def shim_dma_single_bd_task(alloc, mem, tap=None, offset=None, sizes=None, strides=None, issue_token=False):
    return f"@{alloc.name} arg{mem} {offset} {sizes} {strides} token={issue_token}"


def dma_start_task(*tasks):
    LINES.extend(f"aiex.dma_start_task {task}" for task in tasks)


def dma_await_task(*tasks):
    LINES.extend("aiex.dma_await_task" for _ in tasks)


def dma_free_task(*tasks):
    LINES.extend("aiex.dma_free_task" for _ in tasks)
