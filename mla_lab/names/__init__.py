"""The names of other libraries: `flashinfer` and `flash_mla`, for programs written for them."""
