// One object, many references. worker0 keeps a counter on the last worker; all workers
// count on it; it is destroyed with the last reference.
//
//   stitch-run -n 3 ./rref_counter

#include <stitch/stitch.h>

#include <atomic>
#include <iostream>
#include <string>
#include <vector>

// An ordinary class. It never travels, so it need be neither copyable nor sendable.
class Counter {
 public:
  explicit Counter(std::string name) : name_(std::move(name)) {}
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  ~Counter() { std::cout << "the counter of " << name_ << " goes at " << value_ << std::endl; }

  int add(int by) { return value_ += by; }

 private:
  const std::string name_;
  std::atomic<int> value_{0};  // methods of one object may run at once
};

// Runs wherever it is called; the counter stays where it is. The reference is an argument like any
// other.
int count_to(stitch::RRef<Counter> counter, int times) {
  int last = 0;
  for (int i = 0; i < times; ++i) last = counter.rpc_sync<&Counter::add>(1);
  return last;
}

int main() {
  auto self = stitch::init();
  if (self.rank() == 0) {
    const int last = self.world_size() - 1;
    {
      // Constructed over there; this returns at once, and what we ask of the counter waits until it
      // is there.
      auto counter = stitch::remote<Counter>("worker" + std::to_string(last), "apples");

      // Every worker counts to 100, all at the same time.
      std::vector<stitch::Future<int>> counting;
      for (int rank = 0; rank < self.world_size(); ++rank) {
        counting.push_back(stitch::rpc_async<count_to>(
            stitch::WorkerId(static_cast<std::uint32_t>(rank)), counter, 100));
      }
      for (auto& each : counting) each.get();
      std::cout << "counted to " << counter.rpc_sync<&Counter::add>(0) << " on "
                << counter.owner().name << std::endl;
    }  // the last reference is dropped here, and the counter destroyed over there
  }
  self.barrier();
}
