"""A student on dp=2 learns from the logits of a teacher on tp=2, with two published blocks."""

import torch
import torch.distributed as dist
from models import gpt, tokens

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {}}


class Distillation:
    def __init__(self, teacher_groups, student_groups):
        self.groups = {"teacher": teacher_groups, "student": student_groups}
        self.models = {name: gpt(pg) for name, pg in self.groups.items()}

    def logits(self, name):
        pg = self.groups[name]
        with megapg.published(pg):
            part = self.models[name](tokens(), tokens(), None)
        parts = [torch.empty_like(part) for _ in range(pg.size("tp"))]
        dist.all_gather(parts, part.detach(), group=pg.tp)
        return part if len(parts) == 1 else torch.cat(parts, dim=-1)

    def loss(self):
        wanted = self.logits("teacher").softmax(-1)
        return torch.nn.functional.cross_entropy(self.logits("student"), wanted)


def program(teacher, student):
    loss = Distillation(teacher, student).loss()
    loss.backward()
    assert loss.item() > 0
