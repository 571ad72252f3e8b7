"""What the processes of a server agree on before their ranks can meet. Plain data."""

# Set where a rank is started, and checked where it joins the others. NVLink multicast stays off:
# NCCL's, that of torch's symmetric memory, and NVSHMEM's.
RANK_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

MEETING_FILE = "ranks"  # in the folder of the sockets: where ranks find each other
