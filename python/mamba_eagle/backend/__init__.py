"""Attention, recurrence and bookkeeping of a step, for each kind of device.

``devices.py`` picks one ``Backend`` when a runner starts; no other code asks for a device, a dtype
or an installed package. Each backend is a folder: ``torch`` works everywhere and is the fallback of
the others, ``triton`` has GPU kernels. That of a CPU is an engine of its own, the room ``cpu``.
"""
