#include "stitch/rref/rref.h"

namespace {

int add(int a, int b) { return a + b; }
struct Counter {
  explicit Counter(int) {}
  int add(int by) { return by; }
};

}  // namespace

int all(stitch::Worker& worker) {
  // error: an argument does not convert to its parameter's type @ char.*, int, .*Argument<2, .*add>
  stitch::rpc_sync<add>("worker1", 1, "text");
  // error: the number of arguments is not that of the function's parameters @ <1, 2, .*add>
  stitch::rpc_async<add>("worker1", 1).get();
  // error: the type has no constructor for these arguments @ Counter, int, int>
  static_cast<void>(stitch::remote<Counter>("worker1", 1, 2));
  // error: a pointer cannot be sent @ <int ?\*, .*ConstructorArgument<1, .*Counter>
  static_cast<void>(stitch::remote<Counter>("worker1", static_cast<int*>(nullptr)));
  // error: the function is a template argument: write rpc_sync<f> @ int ?\(&\)\(int, int\)
  const int sum = stitch::rpc_sync(add, "worker1", 1, 2);
  // error: is a template argument: .* rref.rpc_sync<&T::method>\(...\) @ Counter::\*\)\(int\)
  stitch::RRef<Counter>().rpc_async(&Counter::add, 1);
  // error: the function is a template argument @ lambda
  worker.notify([](int) {}, "worker1", 1);
  return sum;
}
