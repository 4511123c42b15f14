// Drives the shim without XLA and without Python.
//
//   shim_driver SHIM HIP_LIBRARY [TEST...]      runs all tests, or those named
//   shim_driver --code-object FILE              writes a code object as the tests use it

#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <type_traits>

namespace jax_sparse_mla {
namespace {

Shim shim;
std::atomic<int> failures{0};
std::atomic<uint32_t> codes_made{0};

std::atomic<int64_t> live_allocations{0};
thread_local int64_t allocations_until_failure = -1;
thread_local int allocations_failed = 0;

void* Allocate(size_t size) {
  if (allocations_until_failure >= 0 && allocations_until_failure-- == 0) {
    ++allocations_failed;
    throw std::bad_alloc();
  }
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  ++live_allocations;
  return memory;
}

void Free(void* memory) {
  if (memory == nullptr) return;
  --live_allocations;
  std::free(memory);
}

void Open(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(2);
  }
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) {
      std::fprintf(stderr, "the shim has no %s\n", name);
      std::exit(2);
    }
  };
  find(shim.initialize, "jax_sparse_mla_initialize");
  find(shim.execute, "jax_sparse_mla_execute");
  find(shim.execute_host, "jax_sparse_mla_execute_host");
  find(shim.contract, "jax_sparse_mla_contract");
}

// HIP as the driver needs it; read by the simulator's library at its first call.
void SetEnvironment() {
  std::string archs;
  for (int device = 0; device < kNumDevices; ++device) {
    archs += device == kOtherArchDevice ? "gfx942" : "gfx950";
    if (device + 1 < kNumDevices) archs += ",";
  }
  setenv("GFX950_SIM_HIP_DEVICES", std::to_string(kNumDevices).c_str(), 1);
  setenv("GFX950_SIM_HIP_ARCH", archs.c_str(), 1);
  setenv("GFX950_SIM_HIP_LAUNCH", "simulate", 1);
}

// Libraries that cannot serve, then one that can: the shim keeps no failure. This has to come
// before anything else loads HIP.
void MissingHip(const char* hip_path) {
  std::string code = NewCode();
  Call call = MakeCall(code);
  setenv("JAX_SPARSE_MLA_HIP_LIBRARY", "/nowhere/libamdhip64.so", 1);
  EXPECT_ERROR(Initialize(call), UNAVAILABLE, "JAX_SPARSE_MLA_HIP_LIBRARY", "/nowhere/");
  EXPECT_ERROR(ExecuteHost(call), UNAVAILABLE, "JAX_SPARSE_MLA_HIP_LIBRARY", "/nowhere/");
  const char* not_hip = "libanl.so.1";  // glibc's, and not loaded otherwise
  setenv("JAX_SPARSE_MLA_HIP_LIBRARY", not_hip, 1);
  EXPECT_ERROR(Initialize(call), UNAVAILABLE, "HIP runtime has no hipGetDevice", "ROCm 6");
  EXPECT(dlopen(not_hip, RTLD_NOW | RTLD_NOLOAD) == nullptr);
  Call nothing = MakeCall(code, {0});
  EXPECT_OK(ExecuteHost(nothing));
  setenv("JAX_SPARSE_MLA_HIP_LIBRARY", hip_path, 1);
  EXPECT_OK(Initialize(call));
}

int RunTests(int argc, char** argv) {
  Open(argv[1]);
  SetEnvironment();
  MissingHip(argv[2]);
  SimulatedHip::Open(argv[2]);
  std::printf("%s MissingHip\n", failures == 0 ? "ok    " : "FAILED");
  int passed = failures == 0, failed = failures != 0;
  for (const Test* test : Test::All()) {
    const bool wanted = argc == 3 || std::any_of(argv + 3, argv + argc, [&](const char* name) {
                          return std::strcmp(name, test->name) == 0;
                        });
    if (!wanted) continue;
    const int before = failures;
    SimulatedHip::Get().SetDevice(0);
    SimulatedHip::Get().clear_failures();
    SimulatedHip::Get().clear_calls();
    test->run();
    EXPECT(LiveErrors() == 0);
    const bool ok = failures == before;
    (ok ? passed : failed) += 1;
    std::printf("%s %s\n", ok ? "ok    " : "FAILED", test->name);
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace

const Shim& Shim::Get() { return shim; }

Outcome Initialize(Call& call) {
  return call.Run(shim.initialize, XLA_FFI_ExecutionStage_INITIALIZE);
}
Outcome Execute(Call& call) { return call.Run(shim.execute, XLA_FFI_ExecutionStage_EXECUTE); }
Outcome ExecuteHost(Call& call) {
  return call.Run(shim.execute_host, XLA_FFI_ExecutionStage_EXECUTE);
}

std::string NewCode(CodeObjectSpec spec) {
  spec.padding = ++codes_made;
  return WriteCodeObject(spec);
}

Test::Test(const char* name, void (*run)()) : name(name), run(run) { All().push_back(this); }

std::vector<Test*>& Test::All() {
  static std::vector<Test*> all;
  return all;
}

void Fail(const char* file, int line, const std::string& what) {
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

void ExpectOk(const char* file, int line, const std::string& what, const Outcome& outcome) {
  if (outcome) Fail(file, line, what + " gave the error: " + outcome->second);
}

void ExpectError(const char* file, int line, const std::string& what, const Outcome& outcome,
                 XLA_FFI_Error_Code code, const std::vector<std::string>& parts) {
  if (!outcome) return Fail(file, line, what + " gave no error, wanted \"" + parts[0] + "\"");
  if (outcome->first != code) {
    Fail(file, line,
         what + " gave code " + std::to_string(outcome->first) + ", wanted " +
             std::to_string(code) + ": " + outcome->second);
  }
  for (const std::string& part : parts) {
    if (outcome->second.find(part) == std::string::npos) {
      Fail(file, line, what + " gave \"" + outcome->second + "\" without \"" + part + "\"");
    }
  }
}

int FailAllocations(int64_t countdown) {
  allocations_until_failure = countdown;
  return std::exchange(allocations_failed, 0);
}

int64_t LiveAllocations() { return live_allocations; }

}  // namespace jax_sparse_mla

void* operator new(size_t size) { return jax_sparse_mla::Allocate(size); }
void* operator new[](size_t size) { return jax_sparse_mla::Allocate(size); }
void operator delete(void* memory) noexcept { jax_sparse_mla::Free(memory); }
void operator delete[](void* memory) noexcept { jax_sparse_mla::Free(memory); }
void operator delete(void* memory, size_t) noexcept { jax_sparse_mla::Free(memory); }
void operator delete[](void* memory, size_t) noexcept { jax_sparse_mla::Free(memory); }

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--code-object") == 0) {
    const std::string code = jax_sparse_mla::WriteCodeObject({});
    std::ofstream file(argv[2], std::ios::binary);
    file.write(code.data(), static_cast<std::streamsize>(code.size()));
    return file.flush() ? 0 : 2;
  }
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s SHIM HIP_LIBRARY [TEST...] | --code-object FILE\n", argv[0]);
    return 2;
  }
  return jax_sparse_mla::RunTests(argc, argv);
}
