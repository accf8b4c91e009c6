"""What several models in one job need, on top of sessions: the parts of megapg for RL frameworks.

``refit`` moves weights into a model of another layout, ``joint`` makes a group between two jobs,
``turns`` runs each model on its own session, and ``ray`` launches Ray's actors.
"""
