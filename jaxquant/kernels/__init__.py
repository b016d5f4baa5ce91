"""Kernels of our own, a folder an op: ``reference`` (the meaning), ``tpu``, ``gpu``, ``cases``, ``tuning``, ``api``.

A kernel is a faster way to compute a piece of an op, behind ``implementation=``, and never a second meaning.
"""
