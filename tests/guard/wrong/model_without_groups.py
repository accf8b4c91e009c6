"""A draft head has no collection, so ``groups_of`` answers from the globals (as in SkyRL)."""

import torch
from layouts import session_and_globals

import megapg

WORLD = 2
READER = "rows_of_the_head"
GIVEN = "export_draft"


def rows_of_the_head(head):
    return head.out_features // megapg.groups_of(head, "tp").size("tp")


def export_draft(policy_groups, head):
    return [rows_of_the_head(head), policy_groups.size("tp")]


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return export_draft(pg, torch.nn.Linear(2, 8))


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        head = torch.nn.Linear(2, 8)
        head.pg_collection = pg
        return export_draft(pg, head)
