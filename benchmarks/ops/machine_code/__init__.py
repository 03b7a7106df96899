"""What compilers made of the kernels: registers, accesses, launches; compiled without a GPU."""
