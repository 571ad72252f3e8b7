"""Grammars: what a request's output may be, and which tokens that leaves at each node of a tree.

The server process builds a grammar's text (``grammar``, ``schema``, ``structural_tag``) and tries
it on the model's vocabulary (``vocabulary``). The text travels as ``SamplingParams.grammar``; the
runner makes matchers of it (``matchers``) and walks them over draft trees (``walk``). No torch.
"""
