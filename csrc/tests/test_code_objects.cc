// Code objects: whole ones load once a device; broken, foreign and mistaken ones are refused before
// HIP sees them.

#include <elf.h>

#include <cstring>
#include <random>

#include "driver.h"
#include "sha256.h"

namespace jax_sparse_mla {
namespace {

std::string Hex(const std::string& bytes) {
  std::string hex;
  for (unsigned char byte : bytes) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

SHIM_TEST(Sha256OfKnownMessages) {
  // NIST's examples for SHA-256, and lengths around a block's padding (values from hashlib).
  const struct {
    std::string message;
    const char* digest;
  } cases[] = {
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(55, 'a'), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
      {std::string(56, 'a'), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
      {std::string(64, 'a'), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
      {std::string(1000000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const auto& [message, digest] : cases) EXPECT(Hex(Hash(message)) == digest);
}

// A call with this code object and its right hash.
Outcome TryCode(const std::string& code) {
  Call call = MakeCall(code);
  return Initialize(call);
}

std::string Edit(std::string code, size_t offset, const std::string& bytes) {
  return code.replace(offset, bytes.size(), bytes);
}

SHIM_TEST(BrokenCodeObjectsAreRefused) {
  const std::string code = NewCode();
  SimulatedHip::Get().clear_calls();
  EXPECT_ERROR(TryCode(""), INVALID_ARGUMENT, "'code' is not an ELF file (0 bytes)");
  EXPECT_ERROR(TryCode("\x7f"
                       "EL"),
               INVALID_ARGUMENT, "'code' is not an ELF file (3 bytes)");
  EXPECT_ERROR(TryCode("__CLANG_OFFLOAD_BUNDLE__" + code), INVALID_ARGUMENT, "not an ELF file");
  for (size_t size = 4; size < code.size(); ++size) {
    EXPECT_ERROR(TryCode(code.substr(0, size)), INVALID_ARGUMENT, "the code object is truncated");
  }
  EXPECT_ERROR(TryCode(Edit(code, EI_CLASS, "\1")), INVALID_ARGUMENT, "not a 64-bit AMDGPU ELF");
  EXPECT_ERROR(TryCode(Edit(code, EI_DATA, "\2")), INVALID_ARGUMENT, "not a 64-bit AMDGPU ELF");
  EXPECT_ERROR(TryCode(Edit(code, offsetof(Elf64_Ehdr, e_machine), std::string("\x3e\0", 2))),
               INVALID_ARGUMENT, "not a 64-bit AMDGPU ELF", "machine 62");
  EXPECT_ERROR(TryCode(Edit(code, offsetof(Elf64_Ehdr, e_shentsize), "\1")), INVALID_ARGUMENT,
               "headers of an unknown size");
  EXPECT_ERROR(TryCode(Edit(code, offsetof(Elf64_Ehdr, e_shoff), std::string(8, '\xff'))),
               INVALID_ARGUMENT, "truncated");
  EXPECT_ERROR(TryCode(Edit(code, offsetof(Elf64_Ehdr, e_phoff), std::string(8, '\xff'))),
               INVALID_ARGUMENT, "truncated");
  const size_t file_size = sizeof(Elf64_Ehdr) + offsetof(Elf64_Phdr, p_filesz);
  EXPECT_ERROR(TryCode(Edit(code, file_size, std::string(8, '\xff'))), INVALID_ARGUMENT,
               "truncated");

  // Sections: null, note, text, two descriptors, names, symbols.
  const size_t table = code.size() - 7 * sizeof(Elf64_Shdr);
  auto section = [&](size_t number, size_t field) {
    return table + number * sizeof(Elf64_Shdr) + field;
  };
  EXPECT_ERROR(TryCode(Edit(code, section(1, offsetof(Elf64_Shdr, sh_size)), "\xff\xff\xff\xff")),
               INVALID_ARGUMENT, "truncated");
  EXPECT_ERROR(TryCode(Edit(code, section(3, offsetof(Elf64_Shdr, sh_size)), "\x3f")),
               INVALID_ARGUMENT, "descriptor of kernel 'sparse_mla_whole' lies outside");
  uint64_t symbols;
  std::memcpy(&symbols, &code[section(6, offsetof(Elf64_Shdr, sh_offset))], sizeof symbols);
  // Symbols: null, the kernel, its descriptor.
  const size_t symbol = symbols + 2 * sizeof(Elf64_Sym);
  EXPECT_ERROR(TryCode(Edit(code, symbol + offsetof(Elf64_Sym, st_shndx), "\xff\xff")),
               INVALID_ARGUMENT, "descriptor of kernel 'sparse_mla_whole' lies outside");
  EXPECT_ERROR(TryCode(Edit(code, symbol + offsetof(Elf64_Sym, st_value), "\xff\xff\xff\xff")),
               INVALID_ARGUMENT, "descriptor of kernel 'sparse_mla_whole' lies outside");
  EXPECT_ERROR(TryCode(Edit(code, symbol + offsetof(Elf64_Sym, st_name), "\xff\xff\xff\xff")),
               INVALID_ARGUMENT, "has no kernel 'sparse_mla_whole'");
  EXPECT(SimulatedHip::Get().call_count() == 0);
  EXPECT_OK(TryCode(code));
}

SHIM_TEST(AnyDamageIsAnErrorOrHarmless) {
  std::mt19937 random(20261130);
  const std::string code = NewCode();
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = code;
    const int bytes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < bytes; ++i) {
      const size_t at = random() % (random() % 2 == 0 ? sizeof(Elf64_Ehdr) : code.size());
      damaged[at] = static_cast<char>(random());
    }
    if (const Outcome outcome = TryCode(damaged)) {
      EXPECT(outcome->second.size() > 20);
      EXPECT(outcome->second.find("unexpected exception") == std::string::npos);
    }
  }
}

SHIM_TEST(TheHashIsVerified) {
  const std::string code = NewCode();
  SimulatedHip::Get().clear_calls();
  Call call = MakeCall(code);
  call.attributes["code_hash"] = Hash(NewCode());
  EXPECT_ERROR(Initialize(call), INVALID_ARGUMENT, "does not have the hash");
  EXPECT_ERROR(ExecuteHost(call), INVALID_ARGUMENT, "does not have the hash");
  for (size_t size : {0, 31, 33, 64}) {
    call.attributes["code_hash"] = std::string(size, 'x');
    EXPECT_ERROR(Initialize(call), INVALID_ARGUMENT, "does not have the hash that 'code_hash'",
                 "(" + std::to_string(size) + " bytes)");
  }
  EXPECT(SimulatedHip::Get().call_count() == 0);
  call.attributes["code_hash"] = Hash(code);
  EXPECT_OK(Initialize(call));
}

SHIM_TEST(SymbolAndResourcesMustBelongToTheCode) {
  const std::string code = NewCode();
  Call call = MakeCall(code);
  for (const char* symbol : {"", "sparse_mla", "sparse_mla_whole.kd", "sparse_mla_whole2"}) {
    call.attributes["symbol"] = std::string(symbol);
    EXPECT_ERROR(Initialize(call), INVALID_ARGUMENT, "has no kernel '" + std::string(symbol) + "'");
  }
  CodeObjectSpec longer;
  longer.kernels = {"sparse_mla_whole.kd2", "sparse_mla_whole2"};
  call = MakeCall(NewCode(longer));
  EXPECT_ERROR(Initialize(call), INVALID_ARGUMENT, "has no kernel 'sparse_mla_whole'");

  call = MakeCall(code);
  call.attributes["lds_bytes"] = int32_t{65532};
  EXPECT_ERROR(ExecuteHost(call), INVALID_ARGUMENT,
               "'lds_bytes' is 65532 but the kernel has 65536");
  call.attributes["lds_bytes"] = int32_t{-1};
  EXPECT_ERROR(ExecuteHost(call), INVALID_ARGUMENT, "'lds_bytes' is -1");
  call = MakeCall(code);
  EXPECT_OK(ExecuteHost(call));
  call.attributes["lds_bytes"] = int32_t{0};
  EXPECT_ERROR(ExecuteHost(call), INVALID_ARGUMENT, "'lds_bytes' is 0 but the kernel has 65536");

  CodeObjectSpec fewer;
  fewer.argument_sizes.pop_back();
  call = MakeCall(NewCode(fewer));
  EXPECT_ERROR(ExecuteHost(call), INVALID_ARGUMENT, "takes 104 bytes of arguments",
               "launch contract 1 has 108");
  CodeObjectSpec more;
  more.argument_sizes.push_back(8);
  call = MakeCall(NewCode(more));
  EXPECT_ERROR(ExecuteHost(call), INVALID_ARGUMENT, "takes 120 bytes of arguments");
}

SHIM_TEST(EachKernelOfACodeObjectIsFound) {
  CodeObjectSpec spec;
  spec.kernels = {"first", "second", "first.second"};
  Call call = MakeCall(NewCode(spec));
  SimulatedHip::Get().clear_calls();
  for (int round = 0; round < 3; ++round) {
    for (const std::string& symbol : spec.kernels) {
      call.attributes["symbol"] = symbol;
      EXPECT_OK(Initialize(call));
    }
  }
  int functions = 0;
  for (const std::string& name : SimulatedHip::Get().CallNames()) {
    functions += name == "hipModuleGetFunction";
  }
  EXPECT(functions == 3);
}

SHIM_TEST(AnotherArchIsNamed) {
  const std::string code = NewCode();
  Call call = MakeCall(code);
  call.context.device = kOtherArchDevice;
  const int64_t modules = SimulatedHip::Get().live("module");
  EXPECT_ERROR(Initialize(call), FAILED_PRECONDITION, "compiled for gfx950", "device 7 is gfx942",
               "implementation=\"reference\"");
  EXPECT_ERROR(ExecuteHost(call), FAILED_PRECONDITION, "compiled for gfx950", "device 7 is gfx942",
               "implementation=\"reference\"");
  EXPECT(SimulatedHip::Get().live("module") == modules);

  CodeObjectSpec other;
  other.mach = 0x4c;
  call = MakeCall(NewCode(other));
  EXPECT_ERROR(Initialize(call), INVALID_ARGUMENT,
               "'arch' is 'gfx950' but the code object is for gfx942");
  call.attributes["arch"] = std::string("gfx942");
  EXPECT_ERROR(Initialize(call), FAILED_PRECONDITION, "compiled for gfx942", "device 0 is gfx950");
  call.context.device = kOtherArchDevice;
  EXPECT_OK(Initialize(call));
  call.attributes["arch"] = std::string("gfx950");
  EXPECT_ERROR(ExecuteHost(call), INVALID_ARGUMENT, "'arch' is 'gfx950'");
  other.mach = 0x41;
  call = MakeCall(NewCode(other));
  EXPECT_ERROR(Initialize(call), INVALID_ARGUMENT, "'arch' is 'gfx950'", "EF_AMDGPU_MACH 65");
}

SHIM_TEST(EachDeviceLoadsOnItself) {
  const SimulatedHip& hip = SimulatedHip::Get();
  const std::string code = NewCode();
  hip.SetDevice(2);
  for (int device = 0; device < kOtherArchDevice; ++device) {
    Call call = MakeCall(code);
    call.context.device = device;
    hip.clear_calls();
    EXPECT_OK(Initialize(call));
    EXPECT_OK(Initialize(call));
    SimhipCall record;
    int loads = 0;
    for (uint64_t i = 0; hip.get_call(i, &record) == 0; ++i) {
      if (std::strcmp(record.name, "hipModuleLoadData") != 0) continue;
      ++loads;
      EXPECT(record.device == device);
    }
    EXPECT(loads == 1);
    EXPECT(hip.CurrentDevice() == 2);
    EXPECT_OK(ExecuteHost(call));
    EXPECT(hip.CurrentDevice() == 2);
  }
}

}  // namespace
}  // namespace jax_sparse_mla
