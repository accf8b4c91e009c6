"""A thread measures with its own collection while the main thread trains inside ``published``."""

import threading

import torch
import torch.distributed as dist
from models import train

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {}}


def measure(pg, totals):
    for _ in range(20):
        total = torch.ones(1)
        dist.all_reduce(total, group=pg.dp)
        totals.append(total.item() / pg.size("dp"))


def program(actor, monitor):
    totals = []
    thread = threading.Thread(target=measure, args=(monitor, totals))
    with megapg.published(actor):
        thread.start()
        train(actor)
        thread.join()
    assert totals == [1.0] * 20
