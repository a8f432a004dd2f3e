// Behind hopper.h: barriers, tensor loads and stores, and wgmma. Included by device.cpp.
#include "hopper.h"

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
  // Bytes that another block sends may come before the own thread expects them.
  if (b.pending < 0 || (b.pending == 0 && b.bytes < 0))
    fail("a barrier got more than it expected: " + std::to_string(b.pending) + " arrivals, " +
         std::to_string(b.bytes) + " bytes left");
  if (b.pending == 0 && b.bytes == 0) { b.phase ^= 1; b.pending = b.expected; }
}
void barrier_init(uint32_t address, int count) {
  counted_barriers[{current->home, address}] = {count, count, 0, 0};
}
void barrier_arrive(uint32_t address, int count) {
  Counted& b = counted(address);
  b.pending -= count;
  settle(b);
}
void barrier_arrive_expect(uint32_t address, int bytes) {
  Counted& b = counted(address);
  b.bytes += bytes;
  b.pending--;
  settle(b);
}
static std::map<std::pair<Block*, int>, Barrier> named_barriers;
void named_barrier(int id, int threads) {
  arrive_and_wait(named_barriers[{current->home, id}], threads);
}
void named_barrier_arrive(int id, int threads) {
  Barrier& barrier = named_barriers[{current->home, id}];
  if (++barrier.count == threads) {
    barrier.count = 0;
    barrier.generation++;
    switches_without_progress = 0;
  }
}

// ---- the tensor memory accelerator

template <class F> static void each_element(const TensorMap& map, const int* at, F visit) {
  long long total = 1;
  int count[5];
  for (int d = 0; d < map.rank; d++) total *= count[d] = (map.box[d] + map.step[d] - 1) / map.step[d];
  for (long long i = 0; i < total; i++) {
    long long rest = i, offset = 0;
    bool inside = true;
    for (int d = 0; d < map.rank; d++) {
      long long c = at[d] + rest % count[d] * map.step[d];
      rest /= count[d];
      inside &= c >= 0 && c < map.extent[d];
      offset += c * map.stride[d];
    }
    visit(i * map.bytes, inside ? map.data + offset : nullptr);
  }
}
struct Load { Block* home; TensorMap map; int at[5]; uint32_t target, barrier; };
static std::vector<Load> loads;
void tensor_load(uint32_t target, const void* map, const int* at, int rank, uint32_t barrier, int blocks) {
  const TensorMap* m = (const TensorMap*)map;
  if (current->waits_yet) fail("memory is touched in front of the wait");
  if (m->rank != rank) fail("a bulk tensor load of another rank than its map");
  if (target % 1024) fail("a swizzled box that does not start at 1024 bytes");
  counted(barrier);
  Load load{current->home, *m, {}, target, barrier};
  memcpy(load.at, at, rank * sizeof(int));
  for (int block = 0; block < cluster_size; block++) {
    if (blocks ? !(blocks >> block & 1) : block != (int)current->rank) continue;
    load.home = &(*cluster_blocks)[block];
    loads.push_back(load);
  }
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
      if (load.map.tf32) {
        uint32_t bits;
        memcpy(&bits, target, 4);
        bits += 0x1000;
        memcpy(target, &bits, 4);
      }
      bytes += n;
    });
    Counted& b = counted(load.barrier);
    b.bytes -= bytes;
    settle(b);
    return true;
  }
  return false;
}

static Block* block_at(uint32_t address) { return &(*cluster_blocks)[(address >> 20) - 1]; }
static Counted& counted_at(uint32_t address) {
  auto found = counted_barriers.find({block_at(address), address & 0xfffff});
  if (found == counted_barriers.end()) fail("use of a barrier of another block before it is there");
  return found->second;
}
void tvmf_send_to(uint32_t address, float a, float b, float c, float d, uint32_t barrier) {
  Running other = *running();
  other.home = block_at(address);
  Fiber* own = current;
  current = &other;
  float values[] = {a, b, c, d};
  char* place = shared_at(address & 0xfffff, 16);
  current = own;
  memcpy(place, values, 16);
  Counted& found = counted_at(barrier);
  found.bytes -= 16;
  settle(found);
}
void tvmf_arrive_at(void* p, int rank) {
  Counted& found = counted_at(tvmf_place_in(p, rank));
  found.pending--;
  settle(found);
}
void barrier_wait(const void* p, int parity) {
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
void tensor_store(const void* map, const int* at, int rank, uint32_t source) {
  const TensorMap* m = (const TensorMap*)map;
  if (m->rank != rank) fail("a bulk tensor store of another rank than its map");
  Store store{*m, {}, source};
  memcpy(store.at, at, rank * sizeof(int));
  open_stores[current].push_back(store);
}
void store_commit() {
  stores[current].push_back(open_stores[current]);
  open_stores[current].clear();
}
void store_wait(size_t left) {
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
float from_table(bool brain, uint16_t bits) {
  static std::vector<float> tables[2];
  std::vector<float>& table = tables[brain];
  if (table.empty())
    for (int i = 0; i < 65536; i++) table.push_back(brain ? Brain16::widen(i) : Half16::widen(i));
  return table[bits];
}

static float term(Kind kind, const char* p) {
  uint32_t bits = 0;
  memcpy(&bits, p, kind == TF32 ? 4 : kind >= E4M3 ? 1 : 2);
  if (kind <= BRAIN) return from_table(kind == BRAIN, bits);
  if (kind == TF32) {
    bits &= 0xffffe000u;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  if (kind == E4M3) { __nv_fp8_e4m3 x; x.bits = bits; return x; }
  __nv_fp8_e5m2 x;
  x.bits = bits;
  return x;
}
// Element (row, k) of an operand: rows of 128 or 64 bytes by k (K-major), or 64 halves side by side (`transposed`).
static float operand(uint64_t descriptor, bool transposed, Kind kind, int row, int k) {
  int bytes = kind == TF32 ? 4 : kind >= E4M3 ? 1 : 2;
  uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  uint32_t stride = (descriptor >> 32 & 0x3fff) << 4, address;
  if (transposed) address = start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2;
  else address = start + row / 8 * stride + row % 8 * (descriptor >> 62 == 2 ? 64 : 128) + k * bytes;
  return term(kind, shared_at(swizzled(address, descriptor >> 62 == 2 ? 0x30 : 0x70), bytes));
}
struct Multiply {
  std::vector<float*> sums;
  uint64_t a, b;
  int n;
  bool keep, ta, tb;
  int terms;
  Kind ka, kb;
  std::vector<float> rows;  // of a left operand in registers: two rows of 16 terms
};
static std::map<Fiber*, std::vector<std::vector<Multiply>>> multiplies;
static std::map<Fiber*, std::vector<Multiply>> open_multiplies;
void multiply(std::initializer_list<float*> sums, uint64_t a, uint64_t b, int n, bool keep, bool ta, bool tb, int terms, Kind ka, Kind kb) {
  for (uint64_t d : {a, b})
    if (d >> 62 != 1 && (d >> 62 != 2 || ta || tb)) fail("a matrix descriptor without the 128-byte swizzle, or that of rows of 64 bytes");
  open_multiplies[current].push_back({sums, a, b, n, keep, ta, tb, terms, ka, kb, {}});
}
// The left operand is read at once: what ptxas lets the next instruction do to its registers is ptxas' affair.
// Register r of a thread holds terms 8 * (r / 2) + 2 * (lane % 4) and the next of row lane / 4 + 8 * (r % 2).
void multiply_registers(std::initializer_list<float*> sums, std::initializer_list<uint32_t> a, uint64_t b, int n, bool keep, bool tb, Kind ka, Kind kb) {
  if ((b >> 62) != 1) fail("a matrix descriptor without the 128-byte swizzle");
  Multiply m{sums, 0, b, n, keep, false, tb, 16, ka, kb, std::vector<float>(32)};
  int quad = current->linear % 32 / 4 * 4;
  for (int r = 0; r < 4; r++)
    for (int l = 0; l < 4; l++) {
      uint32_t word = exchange(a.begin()[r], quad + l);
      for (int v = 0; v < 2; v++)
        m.rows[r % 2 * 16 + r / 2 * 8 + l * 2 + v] = from_table(ka == BRAIN, word >> 16 * v & 0xffff);
    }
  open_multiplies[current].push_back(m);
}
void multiply_commit() {
  multiplies[current].push_back(open_multiplies[current]);
  open_multiplies[current].clear();
}
static void multiply_now(const Multiply& m) {
  int warp = current->linear / 32 % 4, lane = current->linear % 32;
  for (int h = 0; h < 2; h++) {
    int row = warp * 16 + lane / 4 + 8 * h;
    float a[32];
    for (int k = 0; k < m.terms; k++)
      a[k] = m.rows.empty() ? operand(m.a, m.ta, m.ka, row, k) : m.rows[h * 16 + k];
    for (int j = 0; j < m.n / 8; j++)
      for (int v = 0; v < 2; v++) {
        float& sum = *m.sums[j * 4 + h * 2 + v];
        double total = m.keep ? sum : 0.0;
        for (int k = 0; k < m.terms; k++)
          total += (double)a[k] * operand(m.b, m.tb, m.kb, j * 8 + lane % 4 * 2 + v, k);
        sum = (float)total;
      }
  }
}
constexpr int FIRST_WARPGROUP = 16;  // behind the barriers that kernels have
void multiply_wait(size_t left) {
  auto& groups = multiplies[current];
  if (groups.size() <= left) return;
  while (groups.size() > left) {
    for (Multiply& m : groups.front()) multiply_now(m);
    groups.erase(groups.begin());
  }
  // The four warps multiply together: none is through before all are.
  named_barrier(FIRST_WARPGROUP + current->linear / 128, 128);
}

// ---- matrices of 8 x 8 halves between registers and shared memory

static std::map<std::pair<Block*, int>, std::vector<uint32_t>> row_addresses;
uint32_t* warp_rows(uint32_t own) {
  auto& rows = row_addresses[{current->home, current->linear / 32}];
  rows.resize(32);
  rows[current->linear % 32] = own;
  __syncwarp();
  return rows.data();
}

// State of a cluster, which its first thread clears.
static void clear_units() {
  counted_barriers.clear(); named_barriers.clear(); row_addresses.clear();
  loads.clear(); stores.clear(); open_stores.clear();
  multiplies.clear(); open_multiplies.clear();
}
