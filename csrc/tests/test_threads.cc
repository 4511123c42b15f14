// First calls from many threads at once, on several devices.

#include <atomic>
#include <map>
#include <thread>

#include "driver.h"

namespace jax_sparse_mla {
namespace {

constexpr int kThreads = 16;
constexpr int kRounds = 20;

// Holds threads until all of them have arrived, again and again.
class Barrier {
 public:
  void Wait() {
    const int arrived = ++arrived_;
    const int all = (arrived + kThreads - 1) / kThreads * kThreads;
    while (arrived_ < all) std::this_thread::yield();
  }

 private:
  std::atomic<int> arrived_{0};
};

// Runs body(thread) on all threads, which start together.
template <typename Body>
void InParallel(Body body) {
  Barrier barrier;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      barrier.Wait();
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Calls of a HIP function by device since the record was cleared.
std::map<int, int> CallsOf(const std::string& function) {
  std::map<int, int> calls;
  SimhipCall call;
  for (uint64_t i = 0; SimulatedHip::Get().get_call(i, &call) == 0; ++i) {
    if (function == call.name) ++calls[call.device];
  }
  return calls;
}

SHIM_TEST(ManyThreadsLoadOnceADevice) {
  const SimulatedHip& hip = SimulatedHip::Get();
  for (int devices : {1, kOtherArchDevice}) {
    // Long, so that all threads are at its hash before any has loaded it.
    const std::string code = NewCode() + std::string(1 << 20, '\0');
    hip.clear_calls();
    const uint64_t launches = hip.launch_count();
    InParallel([&](int thread) {
      const int device = thread % devices;
      Stream stream(device);
      Call call = MakeCall(code);
      call.context = {device, stream.get(), false};
      for (int round = 0; round < kRounds; ++round) {
        if (thread % 2 == 0) EXPECT_OK(Initialize(call));
        EXPECT_OK(Execute(call));
      }
      EXPECT(hip.CurrentDevice() == 0);
    });
    for (const char* function : {"hipModuleLoadData", "hipModuleGetFunction"}) {
      const std::map<int, int> calls = CallsOf(function);
      EXPECT(static_cast<int>(calls.size()) == devices);
      for (const auto& [device, count] : calls) EXPECT(count == 1);
    }
    EXPECT(hip.launch_count() == launches + kThreads * kRounds);
  }
}

SHIM_TEST(ManyFirstCallsAtOnce) {
  // Nothing but the barrier comes before each first call: HIP's own locks order nothing that the
  // shim has to order itself, so a missing lock is a race that TSan sees.
  const SimulatedHip& hip = SimulatedHip::Get();
  constexpr int kFirstCalls = 50;
  std::vector<std::string> codes;
  for (int i = 0; i < kFirstCalls; ++i) codes.push_back(NewCode());
  hip.clear_calls();
  Barrier barrier;
  InParallel([&](int) {
    std::vector<Call> calls;
    for (const std::string& code : codes) calls.push_back(MakeCall(code));
    for (Call& call : calls) {
      barrier.Wait();
      EXPECT_OK(ExecuteHost(call));
    }
  });
  EXPECT(CallsOf("hipModuleLoadData")[0] == kFirstCalls);
  EXPECT(CallsOf("hipModuleGetFunction")[0] == kFirstCalls);
}

SHIM_TEST(ThreadsWithManyCodeObjects) {
  const SimulatedHip& hip = SimulatedHip::Get();
  constexpr int kCodes = 5;
  std::vector<std::string> codes;
  for (int i = 0; i < kCodes; ++i) codes.push_back(NewCode());
  hip.clear_calls();
  InParallel([&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      Call call = MakeCall(codes[(thread + round) % kCodes]);
      call.context.device = (thread + round) % 2;
      EXPECT_OK(ExecuteHost(call));
    }
  });
  int total = 0;
  for (const auto& [device, count] : CallsOf("hipModuleLoadData")) total += count;
  EXPECT(total == 2 * kCodes);
}

SHIM_TEST(AFailureInOneThreadIsRepairedByTheNext) {
  const SimulatedHip& hip = SimulatedHip::Get();
  const std::string code = NewCode();
  const int64_t modules = hip.live("module");
  hip.fail("hipModuleLoadData", 2, 1, 5);
  std::atomic<int> failed{0};
  InParallel([&](int) {
    Call call = MakeCall(code);
    if (const Outcome outcome = ExecuteHost(call)) {
      ++failed;
      EXPECT_ERROR(outcome, INTERNAL, "hipModuleLoadData failed", "hipErrorOutOfMemory (2)");
    }
  });
  EXPECT(failed == 5);
  EXPECT(hip.live("module") == modules + 1);
}

}  // namespace
}  // namespace jax_sparse_mla
