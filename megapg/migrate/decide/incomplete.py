"""Functions that ask a collection for a group which it may lack, since who made it did not fill it
in: nothing serves them that lacks one.
"""

from __future__ import annotations

from megapg.migrate.decide.decisions import Plan
from megapg.migrate.decide.facts import Facts


def ask_nothing_that_lacks_a_group(plan: Plan, facts: Facts) -> bool:
    """Say in the facts which functions ask for more than they are certain to get; whether there are
    any.
    """
    asked = [(each.located.use, each.base, each.answer.needs) for each in plan.decisions]
    asked += [(each.reference.use, each.base, each.needs) for each in plan.passing]
    lacking = {
        use.scope.unit
        for use, base, needs in asked
        if base.fields is not None and not base.fields.issuperset(needs)
    }
    is_new = not lacking <= facts.of_complete
    facts.of_complete |= lacking
    return is_new
