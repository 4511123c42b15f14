// What the driver's tests share: the shim's handlers, expectations, and the list of tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "code_object_writer.h"
#include "frame.h"
#include "simulated_hip.h"

namespace jax_sparse_mla {

constexpr int kNumDevices = 8;
constexpr int kOtherArchDevice = 7;  // a gfx942, the others are gfx950

// The functions that the shim exports.
struct Shim {
  static const Shim& Get();

  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* execute_host;
  const char* (*contract)();
};

Outcome Initialize(Call& call);
Outcome Execute(Call& call);
Outcome ExecuteHost(Call& call);

// A code object that no other test has, so that the process has not loaded it yet.
std::string NewCode(CodeObjectSpec spec = {});

struct Test {
  Test(const char* name, void (*run)());

  static std::vector<Test*>& All();

  const char* name;
  void (*run)();
};

// Counts and prints a failed expectation. Safe from any thread.
void Fail(const char* file, int line, const std::string& what);

void ExpectOk(const char* file, int line, const std::string& what, const Outcome& outcome);
void ExpectError(const char* file, int line, const std::string& what, const Outcome& outcome,
                 XLA_FFI_Error_Code code, const std::vector<std::string>& parts);

// Makes operator new throw once: at this thread's allocation number `countdown` from now on,
// counted from 0; -1 for never. Returns how often it threw since the last call.
int FailAllocations(int64_t countdown);
// Allocations of all threads that were not freed yet.
int64_t LiveAllocations();

}  // namespace jax_sparse_mla

#define SHIM_TEST(name)                     \
  static void name();                       \
  static Test test_of_##name(#name, &name); \
  static void name()

#define EXPECT(condition)                                              \
  do {                                                                 \
    if (!(condition)) Fail(__FILE__, __LINE__, "not so: " #condition); \
  } while (false)

#define EXPECT_OK(outcome) ExpectOk(__FILE__, __LINE__, #outcome, (outcome))
#define EXPECT_ERROR(outcome, code, ...) \
  ExpectError(__FILE__, __LINE__, #outcome, (outcome), XLA_FFI_Error_Code_##code, {__VA_ARGS__})
