// Many calls at once from one thread, and a handler that waits for other workers without a thread.
//   stitch-run -n 3 futures_and_coroutines
#include <stitch/stitch.h>

#include <iostream>
#include <string>
#include <vector>

int square(int x) { return x * x; }

// [tutorial: coroutine]
// Adds the squares of `rank` and of all ranks after it, each on its own worker. While it waits for
// the next worker the coroutine is suspended and holds no thread.
stitch::Future<int> sum_of_squares(int rank, int world_size) {
  int sum = square(rank);
  if (rank + 1 < world_size) {
    const auto next = "worker" + std::to_string(rank + 1);
    sum += co_await stitch::rpc_async<sum_of_squares>(next, rank + 1, world_size);
  }
  co_return sum;
}
// [tutorial: end]

int main() {
  auto self = stitch::init();
  if (self.rank() != 0) return 0;  // the others serve until all workers leave

  // [tutorial: all]
  std::vector<stitch::Future<int>> squares;
  for (const auto& worker : self.workers()) {
    squares.push_back(stitch::rpc_async<square>(worker, 10 + self.rank()));  // returns at once
  }
  for (int value : stitch::when_all(squares).get()) std::cout << value << " ";
  std::cout << "from " << squares.size() << " workers" << std::endl;
  // [tutorial: end]

  // [tutorial: then]
  const stitch::Future<std::string> text = stitch::rpc_async<square>("worker1", 7).then([](int n) {
    return "7 squared is " + std::to_string(n);
  });
  std::cout << text.get() << std::endl;
  // [tutorial: end]

  std::cout << "sum of squares "
            << stitch::rpc_sync<sum_of_squares>("worker1", 1, self.world_size()) << std::endl;
}
