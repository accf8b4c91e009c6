"""A draft head has no collection, so ``groups_of`` answers from the globals (as in SkyRL)."""

import torch

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "rows_of_the_head"
GIVEN = "export_draft"


def rows_of_the_head(head):
    return head.out_features // megapg.groups_of(head, "tp").size("tp")


def export_draft(policy_groups, head):
    return [rows_of_the_head(head), policy_groups.size("tp")]


def program(pg):
    return export_draft(pg, torch.nn.Linear(2, 8))
