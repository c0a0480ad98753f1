// SKELETON (parallel author owns)
package expert

// func New(g *comm.Group, experts int) *Exchange ; (*Exchange).Route(ctx, rowsPerExpert) (*Route, error) ; Route satisfies model.Route structurally
// with one expert rank it is the identity route (copies).
