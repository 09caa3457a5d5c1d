#include "stitch/rref/rref.h"

namespace {

int with_dots(const char*, ...) { return 0; }
struct Counter {
  int value = 0;
  int by_rvalue() && { return value; }
  int as_volatile() volatile { return value; }
  int get() const { return value; }
};
struct WithData {
  int number = 1;
  int operator()(int other) const { return number + other; }
};
struct NotConst {
  int operator()(int other) { return other; }
};

}  // namespace

void all() {
  const stitch::RRef<Counter> counter;
  // error: a member function that is qualified && or volatile @ \(.*Counter::\*\)\(\) ?&&
  counter.rpc_sync<&Counter::by_rvalue>();
  // error: a member function that is qualified && or volatile @ int \(.*Counter::\*\)\(\) ?volatile
  counter.rpc_sync<&Counter::as_volatile>();
  // error: a data member cannot be called remotely: write a method @ int .*Counter::\*
  counter.rpc_sync<&Counter::value>();
  // error: a function that takes `...` cannot be called remotely @ const char ?\*, ?\.\.\.
  stitch::rpc_sync<with_dots>("worker1", "text");
  // error: this object has no operator\(\) or several \(a generic lambda\) @ lambda
  stitch::rpc_sync<[](auto value) { return value; }>("worker1", 1);
  // error: an object with data cannot be called remotely @ WithData
  stitch::rpc_sync<WithData{}>("worker1", 1);
  // error: an operator\(\) that is not const cannot be called remotely @ NotConst
  stitch::rpc_sync<NotConst{}>("worker1", 1);
  // error: a remote function is a function, .* not a value of this type @ <int>
  stitch::rpc_sync<7>("worker1");
  // error: member functions are called through an RRef @ Counter::get
  stitch::rpc_sync<&Counter::get>("worker1");
}
