"""The set as commits on a checkout of SGLang, in the form of its pull requests.

Commits are made from git's object store and a private index: the work tree, the index
and the current branch of the checkout are neither read nor changed.
"""

from __future__ import annotations
