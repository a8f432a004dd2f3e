// Hopper's asynchronous units on the CPU, as late as the programming model allows: a bulk tensor load lands when
// somebody waits for it, a bulk tensor store and a wgmma read their shared memory when they are waited for. A
// stage that is handed back or a box that is overwritten too early therefore gives wrong numbers.

// 128 bytes at most: the host reserves no more.
struct CUtensorMap {
  int32_t rank, bytes;  // dimensions, bytes of an element
  char* data;
  int64_t extent[5], stride[5];  // stride in bytes
  int32_t box[5];
};
typedef CUtensorMap TensorMap;

// ---- shared memory by 32-bit address

static char* shared_base() { return (char*)dynamic_shared().raw; }
static uint32_t __cvta_generic_to_shared(const void* p) { return (uint32_t)((const char*)p - shared_base()); }
static char* shared_at(uint32_t address, int size) {
  char* p = shared_base() + address;
  check(p, size, size);
  return p;
}
// 128-byte swizzle: 16-byte pieces of a row change places by the row's number in its group of eight.
static uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

// ---- barriers

struct Counted { int expected, pending; long long bytes; int phase; };
static std::map<std::pair<Block*, uint32_t>, Counted> counted_barriers;
static Counted& counted(uint32_t address) {
  auto found = counted_barriers.find({current->home, address});
  if (found == counted_barriers.end()) fail("use of a barrier that nobody initialised");
  return found->second;
}
static void settle(Counted& b) {
  switches_without_progress = 0;
  if (b.pending < 0 || b.bytes < 0)
    fail("a barrier got more than it expected: " + std::to_string(b.pending) + " arrivals, " +
         std::to_string(b.bytes) + " bytes left");
  if (b.pending == 0 && b.bytes == 0) { b.phase ^= 1; b.pending = b.expected; }
}
static void barrier_init(uint32_t address, int count) {
  counted_barriers[{current->home, address}] = {count, count, 0, 0};
}
static void barrier_arrive(uint32_t address, int count) {
  Counted& b = counted(address);
  b.pending -= count;
  settle(b);
}
static void barrier_arrive_expect(uint32_t address, int bytes) {
  Counted& b = counted(address);
  b.bytes += bytes;
  b.pending--;
  settle(b);
}
static std::map<std::pair<Block*, int>, Barrier> named_barriers;
static void named_barrier(int id, int threads) {
  arrive_and_wait(named_barriers[{current->home, id}], threads);
}

// ---- the tensor memory accelerator

template <class F> static void each_element(const TensorMap& map, const int* at, F visit) {
  long long total = 1;
  for (int d = 0; d < map.rank; d++) total *= map.box[d];
  for (long long i = 0; i < total; i++) {
    long long rest = i, offset = 0;
    bool inside = true;
    for (int d = 0; d < map.rank; d++) {
      long long c = at[d] + rest % map.box[d];
      rest /= map.box[d];
      inside &= c >= 0 && c < map.extent[d];
      offset += c * map.stride[d];
    }
    visit(i * map.bytes, inside ? map.data + offset : nullptr);
  }
}
struct Load { Block* home; TensorMap map; int at[5]; uint32_t target, barrier; };
static std::vector<Load> loads;
static void tensor_load(uint32_t target, const void* map, const int* at, int rank, uint32_t barrier) {
  const TensorMap* m = (const TensorMap*)map;
  if (m->rank != rank) fail("a bulk tensor load of another rank than its map");
  if (target % 1024) fail("a swizzled box that does not start at 1024 bytes");
  counted(barrier);
  Load load{current->home, *m, {}, target, barrier};
  memcpy(load.at, at, rank * sizeof(int));
  loads.push_back(load);
}
static bool land_one_load() {
  for (size_t i = 0; i < loads.size(); i++) {
    if (loads[i].home != current->home) continue;
    Load load = loads[i];
    loads.erase(loads.begin() + i);
    long long bytes = 0;
    each_element(load.map, load.at, [&](long long place, const char* source) {
      int n = load.map.bytes;
      char* target = shared_at(swizzled(load.target + place), n);
      if (source) { check(source, n, n); memcpy(target, source, n); } else memset(target, 0, n);
      bytes += n;
    });
    Counted& b = counted(load.barrier);
    b.bytes -= bytes;
    settle(b);
    return true;
  }
  return false;
}
static void barrier_wait(const void* p, int parity) {
  uint32_t address = __cvta_generic_to_shared(p);
  while (counted(address).phase == parity) {
    yield_fiber();
    if (counted(address).phase == parity) land_one_load();
  }
}
struct Store { TensorMap map; int at[5]; uint32_t source; };
typedef std::vector<std::vector<Store>> StoreGroups;
static std::map<Fiber*, StoreGroups> stores;
static std::map<Fiber*, std::vector<Store>> open_stores;
static void tensor_store(const void* map, const int* at, int rank, uint32_t source) {
  const TensorMap* m = (const TensorMap*)map;
  if (m->rank != rank) fail("a bulk tensor store of another rank than its map");
  Store store{*m, {}, source};
  memcpy(store.at, at, rank * sizeof(int));
  open_stores[current].push_back(store);
}
static void store_commit() {
  stores[current].push_back(open_stores[current]);
  open_stores[current].clear();
}
static void store_wait(size_t left) {
  StoreGroups& groups = stores[current];
  while (groups.size() > left) {
    for (Store& store : groups.front())
      each_element(store.map, store.at, [&](long long place, char* target) {
        int n = store.map.bytes;
        if (!target) return;
        check(target, n, n);
        memcpy(target, shared_at(swizzled(store.source + place), n), n);
      });
    groups.erase(groups.begin());
  }
}

// ---- wgmma: a thread computes the accumulators it holds

struct Half16 { static float widen(uint16_t bits) { half h; memcpy(&h, &bits, 2); return (float)h; } };
struct Brain16 { static float widen(uint16_t bits) { nv_bfloat16 b; b.bits = bits; return b; } };
static float from_table(bool brain, uint16_t bits) {
  static std::vector<float> tables[2];
  std::vector<float>& table = tables[brain];
  if (table.empty())
    for (int i = 0; i < 65536; i++) table.push_back(brain ? Brain16::widen(i) : Half16::widen(i));
  return table[bits];
}
// Element (row, k) of an operand: rows of 64 halves by k (K-major), or 64 rows side by side (`transposed`).
static float operand(uint64_t descriptor, bool transposed, bool brain, int row, int k) {
  uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  uint32_t stride = (descriptor >> 32 & 0x3fff) << 4, address;
  if (transposed) address = start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2;
  else address = start + row / 8 * stride + row % 8 * 128 + k * 2;
  uint16_t bits;
  memcpy(&bits, shared_at(swizzled(address), 2), 2);
  return from_table(brain, bits);
}
struct Multiply { std::vector<float*> sums; uint64_t a, b; int n; bool keep, ta, tb, brain; };
static std::map<Fiber*, std::vector<std::vector<Multiply>>> multiplies;
static std::map<Fiber*, std::vector<Multiply>> open_multiplies;
static void multiply(std::vector<float*> sums, uint64_t a, uint64_t b, int n, bool keep, bool ta, bool tb, bool brain) {
  if ((a >> 62) != 1 || (b >> 62) != 1) fail("a matrix descriptor without the 128-byte swizzle");
  open_multiplies[current].push_back({sums, a, b, n, keep, ta, tb, brain});
}
static void multiply_commit() {
  multiplies[current].push_back(open_multiplies[current]);
  open_multiplies[current].clear();
}
static void multiply_now(const Multiply& m) {
  int warp = current->linear / 32 % 4, lane = current->linear % 32;
  for (int h = 0; h < 2; h++) {
    int row = warp * 16 + lane / 4 + 8 * h;
    float a[16];
    for (int k = 0; k < 16; k++) a[k] = operand(m.a, m.ta, m.brain, row, k);
    for (int j = 0; j < m.n / 8; j++)
      for (int v = 0; v < 2; v++) {
        float& sum = *m.sums[j * 4 + h * 2 + v];
        double total = m.keep ? sum : 0.0;
        for (int k = 0; k < 16; k++) total += (double)a[k] * operand(m.b, m.tb, m.brain, j * 8 + lane % 4 * 2 + v, k);
        sum = (float)total;
      }
  }
}
static void multiply_wait(size_t left) {
  auto& groups = multiplies[current];
  while (groups.size() > left) {
    for (Multiply& m : groups.front()) multiply_now(m);
    groups.erase(groups.begin());
  }
}

// ---- matrices of 8 x 8 halves between registers and shared memory

static std::map<std::pair<Block*, int>, std::vector<uint32_t>> row_addresses;
static std::vector<uint32_t>& warp_rows(uint32_t own) {
  auto& rows = row_addresses[{current->home, current->linear / 32}];
  rows.resize(32);
  rows[current->linear % 32] = own;
  __syncwarp();
  return rows;
}
template <bool store> static void move_matrices(uint32_t own, uint32_t* words) {
  auto& rows = warp_rows(own);
  int lane = current->linear % 32;
  for (int i = 0; i < 4; i++) {
    char* place = shared_at(rows[i * 8 + lane / 4] + lane % 4 * 4, 4);
    if (store) memcpy(place, &words[i], 4);
    else memcpy(&words[i], place, 4);
  }
  __syncwarp();
}

// ---- the emulator's own

static void begin_thread() {
  if (current->linear) return;
  counted_barriers.clear(); named_barriers.clear(); row_addresses.clear();
  loads.clear(); stores.clear(); open_stores.clear();
  multiplies.clear(); open_multiplies.clear();
}

// ---- names of the generated code

#define tvm_builtin_cuda_mbarrier_wait barrier_wait
typedef uint __half2;
static float __low2float(uint u) { return from_table(false, u & 0xffff); }
static float __high2float(uint u) { return from_table(false, u >> 16); }
static float __uint_as_float(uint u) { float f; memcpy(&f, &u, 4); return f; }
static void ptx_wgmma_encode_matrix_descriptor(uint64_t* d, void* p, int leading, int stride, int swizzle) {
  uint64_t kind = swizzle == 3 ? 1 : 0;
  *d = (__cvta_generic_to_shared(p) >> 4 & 0x3fff) | (uint64_t)leading << 16 | (uint64_t)stride << 32 | kind << 62;
}
