"""What runs where: attention, recurrence and bookkeeping of a step, for each kind of device.

``choose.py`` picks one ``Backend`` when a runner starts; nothing else asks for a device, a dtype or
an installed package. Each backend is a folder: ``torch`` works everywhere and is what the others
fall back to, ``cpu`` has Numba kernels, ``triton`` those of a GPU.
"""
