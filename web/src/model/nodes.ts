/** What a person can do with a node, and which nodes of a fleet need attention. Pure. The server checks each action. */
import type { Event, Node } from '../contract'
import { NODES } from '../words/nodes'
import { plural, sentence, words } from './format'

export type NodeOperation = 'DrainNode' | 'HoldNode' | 'ReplaceNode' | 'RebootNode' | 'ReleaseNode'

export interface NodeAction {
  verb: string
  operation: NodeOperation
  /** True for a call of ReleaseNode that also terminates the instance. */
  terminate?: boolean
  takesReason: boolean
  /** What happens to the node and its job. */
  effect: string
}

const A = NODES.actions
const DRAIN: NodeAction = { ...A.drain, operation: 'DrainNode', takesReason: true }
const HOLD: NodeAction = { ...A.hold, operation: 'HoldNode', takesReason: true }
const REPLACE: NodeAction = { ...A.replace, operation: 'ReplaceNode', takesReason: true }
const REBOOT: NodeAction = { ...A.reboot, operation: 'RebootNode', takesReason: true }
const RELEASE: NodeAction = { ...A.release, operation: 'ReleaseNode', takesReason: false }
const END: NodeAction = { ...A.end, operation: 'ReleaseNode', terminate: true, takesReason: false }
const CANCEL: NodeAction = { ...A.cancel, operation: 'ReleaseNode', takesReason: false }

/**
 * Return the actions that the state of a node permits, the safest first.
 *
 * The server refuses some of them in some states of the node's fleet, for example while the fleet is frozen.
 */
export function actionsOf(node: Pick<Node, 'NodeStatus' | 'Hold' | 'Request'>): NodeAction[] {
  if (node.Request !== undefined) return [CANCEL]
  switch (node.NodeStatus) {
    case 'assigned':
      return [DRAIN, REPLACE, REBOOT]
    case 'spare':
      return [HOLD, REPLACE, REBOOT]
    case 'held':
      return node.Hold === 'unreachable' ? [REPLACE, END] : [RELEASE, END]
    default:
      return []
  }
}

/** Return the verb of the action that the API recommends for a held node. undefined: the API recommends none. */
export function recommendedVerb({ HoldAdvice: advice }: Pick<Node, 'HoldAdvice'>): string | undefined {
  if (advice?.Decision === 'Terminate') return END.verb
  return advice?.Decision === 'Release' ? RELEASE.verb : undefined
}

type Decided = Pick<Node, 'NodeStatus' | 'Hold' | 'HoldAdvice' | 'Request'>
/**
 * Return the verb that a node's dialog preselects: the recommended one, or else the safest.
 *
 * undefined: the node permits no action, or it is held with several actions and the API recommends none.
 */
export function preselectedVerb(node: Decided): string | undefined {
  const actions = actionsOf(node)
  const isHeld = node.NodeStatus === 'held'
  return recommendedVerb(node) ?? (isHeld && actions.length > 1 ? undefined : actions[0]?.verb)
}

/** Return nodes in the order of a table: the target of a link, then living nodes, then ended nodes, newest first. */
export function arrangedNodes(living: readonly Node[], ended: readonly Node[], target?: Node): Node[] {
  const nodes = new Map([...(target ? [target] : []), ...ended, ...living].map((node) => [node.NodeId, node]))
  const rank = (node: Node) => (node.NodeId === target?.NodeId ? 0 : node.NodeStatus === 'gone' ? 2 : 1)
  return [...nodes.values()].sort((a, b) => rank(a) - rank(b) || b.CreationTime - a.CreationTime)
}

/** Return a notice for each held node and for each node with a pending request of a person. */
export function nodeNotices(nodes: readonly Node[]) {
  return nodes.flatMap((node) => {
    const { NodeId: nodeId } = node
    if (node.NodeStatus === 'held') {
      const reason = node.Hold ? NODES.held[node.Hold] : NODES.heldWithoutReason
      return [{ nodeId, title: NODES.heldTitle(reason), text: sentence(node.Reason) }]
    }
    if (node.Request === undefined) return []
    return [{ nodeId, title: NODES.requested(words(node.Request)), text: sentence(node.RequestReason ?? '') }]
  })
}

type Exposed = Pick<Node, 'NodeId' | 'NodeStatus' | 'Exposure'>

/** Return the sentences about data that the code of jobs can read on nodes but should not, each with its nodes. */
export function exposures(nodes: readonly Exposed[]): { text: string; nodeIds: string[] }[] {
  const found = new Map<string, string[]>()
  for (const { NodeId, NodeStatus, Exposure } of nodes) {
    if (Exposure && NodeStatus !== 'gone') found.set(Exposure, [...(found.get(Exposure) ?? []), NodeId])
  }
  return [...found].map(([text, nodeIds]) => ({ text: sentence(text), nodeIds }))
}

const NOTICES = new Set(['NoticeReceived', 'NodesToBeLeft'])

/** Return the newest `most` notices of AWS, the newest first. */
export const noticesIn = (events: readonly Event[], most = 5): Event[] =>
  events
    .filter((event) => NOTICES.has(event.Type))
    .toReversed()
    .slice(0, most)

/** Return the versions of the agents with their numbers of nodes. There are several during an update. */
export function versionsOf(nodes: readonly Pick<Node, 'AgentVersion' | 'NodeStatus'>[]): string {
  const counts = new Map<string, number>()
  for (const { AgentVersion, NodeStatus } of nodes) {
    if (AgentVersion && NodeStatus !== 'gone') counts.set(AgentVersion, (counts.get(AgentVersion) ?? 0) + 1)
  }
  const texts = [...counts].sort().map(([version, number]) => `${version} on ${plural(number, 'node')}`)
  return texts.join(', ') || NODES.noVersion
}
