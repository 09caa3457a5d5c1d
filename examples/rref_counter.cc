// One object, many references: worker0 creates a counter on the last worker, all workers add to it,
// and it is destroyed when the last reference to it is gone.
//   stitch-run -n 3 rref_counter
#include <stitch/stitch.h>

#include <atomic>
#include <iostream>
#include <string>
#include <vector>

// [tutorial: class]
// An ordinary class. It never travels, so it need be neither copyable nor sendable.
class Counter {
 public:
  explicit Counter(std::string name) : name_(std::move(name)) {}
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  ~Counter() { std::cout << name_ << " counter destroyed at " << value_ << std::endl; }

  int add(int by) { return value_ += by; }

 private:
  const std::string name_;
  std::atomic<int> value_{0};  // methods of one object may run at once
};
// [tutorial: end]

// [tutorial: argument]
// Runs on any worker; the counter stays where it is. A reference is an argument like any other.
int count_to(stitch::RRef<Counter> counter, int times) {
  int last = 0;
  for (int i = 0; i < times; ++i) last = counter.rpc_sync<&Counter::add>(1);
  return last;
}
// [tutorial: end]

int main() {
  auto self = stitch::init();
  if (self.rank() == 0) {
    // [tutorial: use]
    const auto owner = self.workers().back();
    // Constructed on the owner. Returns at once: calls of methods wait there for the constructor.
    auto counter = stitch::remote<Counter>(owner, "apple");

    // Every worker adds 100, all at the same time.
    std::vector<stitch::Future<int>> counting;
    for (const auto& worker : self.workers())
      counting.push_back(stitch::rpc_async<count_to>(worker, counter, 100));
    stitch::when_all(counting).get();
    std::cout << "counted to " << counter.rpc_sync<&Counter::add>(0) << " on "
              << counter.owner().name << std::endl;
    // [tutorial: end]
  }  // the last reference is gone: the owner destroys the counter
  self.barrier();
}
