/* The functions of CANN that need a real body when MindSpore's Ascend plugin only compiles (level 0 of its
 * simulation).
 *
 * stand_ins.py writes every other function of CANN that the plugin names as `long name(void) { return 0; }`,
 * and 0 is "success" to CANN. With 2.7.0 and 2.10.0 the plugin was seen to call these, and no others:
 *
 *   function                       called by        why 0 is enough, or not
 *   -----------------------------  ---------------  ---------------------------------------------------------
 *   ge::StatusFactory::Instance    loading (2.10)   no: the plugin registers its error texts in the object
 *   ge::OperatorCreatorRegister    loading          yes: a constructor, and nobody looks at the object later
 *   aclrtGetSocName                init() (2.7)     no: the name of the chip, a text
 *   aclInit                        data sinking     yes
 *
 * Plain C, nothing of one processor: mangled C++ names are ordinary C identifiers.
 */
#include <stddef.h>

/* ge::StatusFactory holds one member, a std::map<uint32_t, std::string>, and the plugin's inline code inserts
 * into it. This is an empty one as libstdc++ lays it out (bits/stl_tree.h, _Rb_tree_impl): the comparison,
 * then a sentinel node that is its own left and right neighbour, then the number of nodes. */
struct node {
  int color;
  struct node *parent, *left, *right;
};
static struct {
  char compare;
  struct node sentinel;
  size_t count;
} status_texts = {0, {0, NULL, &status_texts.sentinel, &status_texts.sentinel}, 0};
void *_ZN2ge13StatusFactory8InstanceEv(void) { return &status_texts; }

const char *aclrtGetSocName(void) { return "Ascend910B1"; }
