"""Copies of the prefix cache's blocks between the device, host memory and disk.

slot_bytes   what a KV slot, a state slot and a journal slot hold, as bytes
host         the units in host memory
whole        units as files have them: of the whole model, from those of all ranks
disk         the units in a file, their checksums, and the log
copies       does what plans name, and says what has ended
"""
