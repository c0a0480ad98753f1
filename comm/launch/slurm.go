package launch

import (
	"fmt"
	"strconv"
	"strings"
)

// maxHosts bounds what a host list may expand to.
const maxHosts = 1 << 16

// hostList expands Slurm's notation for hosts: names separated by commas, each with any number of brackets that hold numbers
// and ranges. The width of a range's first number pads the others: n[008-010,12],m2 is n008 n009 n010 n12 m2.
func hostList(list string) ([]string, error) {
	var hosts []string
	for rest := list; ; {
		item, more, err := nextItem(rest)
		if err != nil {
			return nil, err
		}
		names, err := expand(item)
		if err != nil {
			return nil, err
		}
		if hosts = append(hosts, names...); len(hosts) > maxHosts {
			return nil, fmt.Errorf("host list has more than %d hosts", maxHosts)
		}
		if more == nil {
			return hosts, nil
		}
		rest = *more
	}
}

// nextItem cuts the list at its first comma outside brackets. more is nil at the last item.
func nextItem(list string) (item string, more *string, err error) {
	inside := false
	for i, c := range list {
		switch {
		case c == '[' && !inside:
			inside = true
		case c == ']' && inside:
			inside = false
		case c == '[' || c == ']':
			return "", nil, fmt.Errorf("host list: bracket out of place at character %d", i+1)
		case c == ',' && !inside:
			rest := list[i+1:]
			return list[:i], &rest, nil
		}
	}
	if inside {
		return "", nil, fmt.Errorf("host list: a bracket is not closed")
	}
	return list, nil, nil
}

// expand gives the names of one item, first bracket outermost.
func expand(item string) ([]string, error) {
	if item == "" {
		return nil, fmt.Errorf("host list: empty name")
	}
	open := strings.IndexByte(item, '[')
	if open < 0 {
		return []string{item}, nil
	}
	end := open + strings.IndexByte(item[open:], ']')
	tails := []string{""}
	if end+1 < len(item) {
		var err error
		if tails, err = expand(item[end+1:]); err != nil {
			return nil, err
		}
	}
	var names []string
	for part := range strings.SplitSeq(item[open+1:end], ",") {
		low, high, ranged := strings.Cut(part, "-")
		if !ranged {
			high = low
		}
		a, err1 := strconv.ParseUint(low, 10, 32)
		b, err2 := strconv.ParseUint(high, 10, 32)
		if err1 != nil || err2 != nil || a > b {
			return nil, fmt.Errorf("host list: %q is no number and no range", part)
		}
		if (b-a+1)*uint64(len(tails))+uint64(len(names)) > maxHosts {
			return nil, fmt.Errorf("host list has more than %d hosts", maxHosts)
		}
		for n := a; n <= b; n++ {
			for _, t := range tails {
				names = append(names, fmt.Sprintf("%s%0*d%s", item[:open], len(low), n, t))
			}
		}
	}
	return names, nil
}

// slurmTasks is the number of tasks on a node of the step, 0 where it is not said. Slurm writes it as 2(x3),1: two tasks on
// each of three nodes, one on the fourth.
func (e *environ) slurmTasks(node int) int {
	name, list := e.find("SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE")
	if name == "" {
		return 0
	}
	at := 0
	for part := range strings.SplitSeq(list, ",") {
		count, times, repeated := strings.Cut(strings.TrimSuffix(part, ")"), "(x")
		n, err := strconv.Atoi(count)
		k := 1
		if err == nil && repeated {
			k, err = strconv.Atoi(times)
		}
		if err != nil || n < 1 || k < 1 {
			e.fail("%s=%s: %q is not a number of tasks", name, list, part)
			return 0
		}
		if at += k; node < at {
			return n
		}
	}
	return 0
}
