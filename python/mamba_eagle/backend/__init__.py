"""Attention, recurrence and bookkeeping of a step, for each kind of device.

``choose.py`` picks one ``Backend`` when a runner starts; no other code asks for a device, a dtype
or an installed package. Each backend is a folder: ``torch`` works everywhere and is the fallback of
the others, ``cpu`` has Numba kernels, and ``triton`` has GPU kernels.
"""
