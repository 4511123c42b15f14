// HIP calls that fail, memory that runs out, and what Execute may call at all.

#include <algorithm>
#include <set>

#include "driver.h"

namespace jax_sparse_mla {
namespace {

constexpr int kInjected = 999;  // hipErrorUnknown

// Executing after Initialize may do this and nothing else: no load, allocation, or wait.
const std::set<std::string> kAllowedInExecute = {"hipGetDevice", "hipSetDevice",
                                                 "hipModuleLaunchKernel"};

struct Injection {
  const char* call;
  uint64_t occurrence;
};

// Each step fails in turn; then, with nothing changed, the next call works.
void FailInTurn(const std::vector<Injection>& injections, Outcome (*run)(Call&),
                Outcome (*before)(Call&)) {
  const SimulatedHip& hip = SimulatedHip::Get();
  for (const Injection& injection : injections) {
    Call call = MakeCall(NewCode());
    call.context.device = 1;  // the thread is on device 0
    if (before != nullptr) EXPECT_OK(before(call));
    const int64_t modules = hip.live("module");
    const bool loaded = before != nullptr || injection.occurrence == 2;
    EXPECT(hip.fail(injection.call, kInjected, injection.occurrence, 1) == 0);
    EXPECT_ERROR(run(call), INTERNAL, std::string(injection.call) + " failed",
                 "hipErrorUnknown (999)");
    hip.clear_failures();
    EXPECT(hip.GetLastError() == 0);
    if (before == nullptr) EXPECT(hip.live("module") == modules + (loaded ? 1 : 0));
    // Only a failing restore can leave the thread elsewhere.
    EXPECT(hip.CurrentDevice() == (injection.occurrence == 2 ? 1 : 0));
    hip.SetDevice(0);
    EXPECT_OK(run(call));
    EXPECT(hip.live("module") == (before == nullptr ? modules + 1 : modules));
    EXPECT(hip.CurrentDevice() == 0);
  }
}

SHIM_TEST(EachFailingCallOfInitialize) {
  FailInTurn({{"hipGetDevice", 1},
              {"hipSetDevice", 1},
              {"hipGetDevicePropertiesR0600", 1},
              {"hipModuleLoadData", 1},
              {"hipModuleGetFunction", 1},
              {"hipSetDevice", 2}},
             &Initialize, nullptr);
}

SHIM_TEST(EachFailingCallOfExecute) {
  FailInTurn(
      {{"hipGetDevice", 1}, {"hipSetDevice", 1}, {"hipModuleLaunchKernel", 1}, {"hipSetDevice", 2}},
      &ExecuteHost, &Initialize);
}

SHIM_TEST(EachFailingCallOfAFirstExecute) {
  FailInTurn({{"hipGetDevice", 1},
              {"hipSetDevice", 1},
              {"hipGetDevicePropertiesR0600", 1},
              {"hipModuleLoadData", 1},
              {"hipModuleGetFunction", 1},
              {"hipSetDevice", 2}},
             &ExecuteHost, nullptr);
}

SHIM_TEST(AFailingUnloadHidesNothing) {
  const SimulatedHip& hip = SimulatedHip::Get();
  Call call = MakeCall(NewCode());
  hip.fail("hipModuleGetFunction", 500, 1, 1);
  hip.fail("hipModuleUnload", kInjected, 1, 1);
  EXPECT_ERROR(Initialize(call), INTERNAL, "hipModuleGetFunction failed", "hipErrorNotFound (500)");
  EXPECT_OK(Initialize(call));
}

SHIM_TEST(AFailingRestoreHidesNothing) {
  const SimulatedHip& hip = SimulatedHip::Get();
  Call call = MakeCall(NewCode());
  call.context.device = 1;
  EXPECT_OK(Initialize(call));
  hip.fail("hipModuleLaunchKernel", 719, 1, 1);
  hip.fail("hipSetDevice", kInjected, 2, 1);
  EXPECT_ERROR(ExecuteHost(call), INTERNAL, "hipModuleLaunchKernel failed",
               "hipErrorLaunchFailure (719)");
  EXPECT(hip.GetLastError() == 0);
  hip.SetDevice(0);
  EXPECT_OK(ExecuteHost(call));
  EXPECT(hip.CurrentDevice() == 0);
}

SHIM_TEST(ALastErrorOfOthersStays) {
  // The shim clears the error of its own failing calls only.
  const SimulatedHip& hip = SimulatedHip::Get();
  Call call = MakeCall(NewCode());
  EXPECT_OK(Initialize(call));
  EXPECT(hip.SetDevice(99) == hipErrorInvalidDevice);
  EXPECT_OK(ExecuteHost(call));
  EXPECT(hip.GetLastError() == hipErrorInvalidDevice);
}

SHIM_TEST(ExecuteOnlyLaunches) {
  const SimulatedHip& hip = SimulatedHip::Get();
  for (int device : {0, 1}) {
    Stream stream(device);
    Call call = MakeCall(NewCode());
    call.context = {device, stream.get(), false};
    EXPECT_OK(Initialize(call));
    hip.clear_calls();
    EXPECT_OK(Execute(call));
    SimhipCall record;
    int launches = 0;
    for (uint64_t i = 0; hip.get_call(i, &record) == 0; ++i) {
      EXPECT(kAllowedInExecute.count(record.name) == 1);
      EXPECT(record.code == 0);
      if (std::string(record.name) != "hipModuleLaunchKernel") continue;
      ++launches;
      EXPECT(record.stream == stream.get());
    }
    EXPECT(launches == 1);
  }
}

SHIM_TEST(ExecuteCanBeCaptured) {
  const SimulatedHip& hip = SimulatedHip::Get();
  for (hipStreamCaptureMode mode :
       {hipStreamCaptureModeGlobal, hipStreamCaptureModeThreadLocal, hipStreamCaptureModeRelaxed}) {
    for (int device : {0, 1}) {
      Stream stream(device);
      Call call = MakeCall(NewCode());
      call.context = {device, stream.get(), false};
      EXPECT_OK(Initialize(call));
      EXPECT(hip.StreamBeginCapture(stream.get(), mode) == 0);
      hip.clear_calls();
      const uint64_t launches = hip.launch_count();
      EXPECT_OK(Execute(call));
      EXPECT_OK(Execute(call));
      for (const std::string& name : hip.CallNames()) EXPECT(kAllowedInExecute.count(name) == 1);
      EXPECT(hip.launch_count() == launches);
      hipGraph_t graph = nullptr;
      hipGraphExec_t executable = nullptr;
      EXPECT(hip.StreamEndCapture(stream.get(), &graph) == 0);
      EXPECT(hip.GraphInstantiate(&executable, graph, nullptr, nullptr, 0) == 0);
      EXPECT(hip.GraphLaunch(executable, stream.get()) == 0);
      EXPECT(hip.launch_count() == launches + 2);
      EXPECT(hip.GraphExecDestroy(executable) == 0);
      EXPECT(hip.GraphDestroy(graph) == 0);
    }
  }
}

SHIM_TEST(ALoadDuringCaptureIsAnErrorOnly) {
  // XLA's order (Initialize first) rules it out; if it happens, HIP's refusal comes back.
  const SimulatedHip& hip = SimulatedHip::Get();
  Stream stream(0);
  Call call = MakeCall(NewCode());
  call.context.stream = stream.get();
  EXPECT(hip.StreamBeginCapture(stream.get(), hipStreamCaptureModeGlobal) == 0);
  EXPECT_ERROR(Execute(call), INTERNAL, "hipModuleLoadData failed",
               "hipErrorStreamCaptureUnsupported (900)");
  hipGraph_t graph = nullptr;
  hip.StreamEndCapture(stream.get(), &graph);
  EXPECT_OK(Initialize(call));
  EXPECT_OK(Execute(call));
}

SHIM_TEST(OutOfMemoryIsAnError) {
  const SimulatedHip& hip = SimulatedHip::Get();
  const struct {
    XLA_FFI_Handler* handler;
    XLA_FFI_ExecutionStage stage;
  } stages[] = {{Shim::Get().initialize, XLA_FFI_ExecutionStage_INITIALIZE},
                {Shim::Get().execute_host, XLA_FFI_ExecutionStage_EXECUTE}};
  // After this the simulator's record of calls has room for as many: it does not run out of memory
  // when it records that it has loaded a module.
  Call recorded = MakeCall(NewCode());
  recorded.context.device = 1;
  EXPECT_OK(ExecuteHost(recorded));
  for (const auto& [handler, stage] : stages) {
    int failed = 1;
    int64_t countdown = 0;
    for (; failed != 0; ++countdown) {
      Call call = MakeCall(NewCode());
      call.context.device = 1;  // the thread is on device 0
      hip.clear_calls();
      const int64_t modules = hip.live("module");
      // The frame is there before; only the shim and HIP run out of memory.
      auto starved = [&, run = handler](XLA_FFI_CallFrame* frame) {
        FailAllocations(countdown);
        XLA_FFI_Error* error = run(frame);
        failed = FailAllocations(-1);
        return error;
      };
      if (const Outcome outcome = call.Run(starved, stage)) {
        // Either the shim ran out, or the library, which says so by its code.
        EXPECT(outcome->second.find("out of host memory") != std::string::npos ||
               outcome->second.find("hipErrorOutOfMemory (2)") != std::string::npos);
        EXPECT(failed == 1);
      }
      EXPECT(hip.CurrentDevice() == 0);
      EXPECT_OK(call.Run(handler, stage));
      EXPECT(hip.live("module") == modules + 1);
    }
    EXPECT(countdown > 5);
  }
}

SHIM_TEST(NothingGrowsWithCalls) {
  const SimulatedHip& hip = SimulatedHip::Get();
  Call good = MakeCall(NewCode());
  Call wrong_shape = MakeCall(NewCode());
  wrong_shape.results[kOut].dims[2] = 1;
  Call wrong_hash = MakeCall(NewCode());
  wrong_hash.attributes["code_hash"] = std::string(32, 'x');
  Call wrong_arch = MakeCall(NewCode());
  wrong_arch.context.device = kOtherArchDevice;
  Call cannot_load = MakeCall(NewCode());
  auto all = [&] {
    EXPECT_OK(Initialize(good));
    EXPECT_OK(ExecuteHost(good));
    EXPECT(ExecuteHost(wrong_shape).has_value());
    EXPECT(Initialize(wrong_hash).has_value());
    EXPECT(ExecuteHost(wrong_arch).has_value());
    hip.fail("hipModuleLoadData", kInjected, 1, 1);
    EXPECT(ExecuteHost(cannot_load).has_value());
    hip.clear_failures();
    hip.clear_calls();
  };
  for (int i = 0; i < 10; ++i) all();
  const int64_t before = LiveAllocations();
  const int64_t modules = hip.live("module");
  for (int i = 0; i < 300; ++i) all();
  EXPECT(LiveAllocations() == before);
  EXPECT(hip.live("module") == modules);
}

}  // namespace
}  // namespace jax_sparse_mla
