"""What each gfx950 instruction does, one module an instruction family.

Each module has a table ``INSTRUCTIONS`` from LLVM mnemonic (without encoding suffix) to a record
of `records`.
"""
