// Included behind a kernel: `LAUNCH` calls it with `kernel_arguments`.
static void** kernel_arguments;
static void enter() {
  LAUNCH;
  current->done = true;
  swapcontext(&current->context, &main_context);
}
static void run_cluster(std::vector<Fiber>& fibers, Dim first, int dynamic_bytes) {
  std::vector<Block> blocks(cluster_size);
  cluster_blocks = &blocks;
  cluster_barrier = Barrier();
  for (Block& block : blocks) {
    block.dynamic.assign(dynamic_bytes + (dynamic_bytes ? 1024 : 0), (char)0xff);
    block.warps.resize(threads_per_block / 32 + 1);
    block.lanes.resize(threads_per_block + 64);
  }
  for (int i = 0; i < (int)fibers.size(); i++) {
    Fiber& f = fibers[i];
    int t = i % threads_per_block;
    f.done = false;
    f.linear = t;
    f.rank = i / threads_per_block;
    f.thread = {t % block_dim.x, t / block_dim.x % block_dim.y, t / block_dim.x / block_dim.y};
    f.block = {first.x + f.rank, first.y, first.z};
    f.home = &blocks[f.rank];
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = &main_context;
    makecontext(&f.context, enter, 0);
  }
  switches_without_progress = 0;
  for (bool left = true; left;) {
    left = false;
    for (Fiber& f : fibers) {
      if (f.done) continue;
      left = true;
      current = &f;
      swapcontext(&main_context, &f.context);
      if (!failure.empty()) return;
      if (f.done) switches_without_progress = 0;
    }
    if (++switches_without_progress > 10000) {
      failure = "the threads wait for each other for ever";
      return;
    }
  }
}
extern "C" const char* run(void** arguments, void** lows, long long* sizes, int count, const unsigned* shape) {
  ranges.clear();
  for (int i = 0; i < count; i++)
    ranges.push_back({(char*)lows[i], (char*)lows[i] + sizes[i], ""});
  kernel_arguments = arguments;
  grid_dim = {shape[0], shape[1], shape[2]};
  block_dim = {shape[3], shape[4], shape[5]};
  cluster_size = shape[6];
  threads_per_block = block_dim.x * block_dim.y * block_dim.z;
  std::vector<Fiber> fibers(threads_per_block * cluster_size);
  for (Fiber& f : fibers) f.stack.resize(65536);
  failure.clear();
  for (unsigned z = 0; z < grid_dim.z; z++)
    for (unsigned y = 0; y < grid_dim.y; y++)
      for (unsigned x = 0; x < grid_dim.x; x += cluster_size) {
        run_cluster(fibers, {x, y, z}, shape[7]);
        if (!failure.empty()) return failure.c_str();
      }
  return nullptr;
}
