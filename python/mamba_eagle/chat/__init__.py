"""Chats: messages become a prompt by the model's chat template, and what the model then writes is
taken apart into reasoning, content and tool calls by its family's response template. No torch.

``render`` goes one way, ``parse`` the other; ``family`` knows the files in ``families/`` that both
the parser and the grammars of forced calls (``call_grammar``) are made of.
"""
