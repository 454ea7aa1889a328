/** What can be asked for a node, and which nodes of a fleet need a look. Pure; the server decides, and says why not. */
import type { Event, Node } from '../contract'
import { plural, sentence, words } from './format'

export type NodeOperation = 'DrainNode' | 'HoldNode' | 'ReplaceNode' | 'RebootNode' | 'ReleaseNode'

export interface NodeAction {
  verb: string
  operation: NodeOperation
  /** Of ReleaseNode: end the instance. */
  terminate?: boolean
  takesReason: boolean
  does: string
}

const DRAIN: NodeAction = { verb: 'Drain', operation: 'DrainNode', takesReason: true, does: 'Its job leaves it at an agreed stop, once another node is there; no step is lost. Then it is held for a person.' }
const HOLD: NodeAction = { verb: 'Hold', operation: 'HoldNode', takesReason: true, does: 'It is given to no job until it is released. It works for nobody now.' }
const REPLACE: NodeAction = { verb: 'Replace', operation: 'ReplaceNode', takesReason: true, does: 'Its job leaves it at an agreed stop; then its instance is ended, and another one comes.' }
const REBOOT: NodeAction = { verb: 'Reboot', operation: 'RebootNode', takesReason: true, does: 'Its job leaves it at an agreed stop; then it is rebooted, and works again.' }
const RELEASE: NodeAction = { verb: 'Release', operation: 'ReleaseNode', takesReason: false, does: 'It works again, and its history counts from now on.' }
const END: NodeAction = { verb: 'End instance', operation: 'ReleaseNode', terminate: true, takesReason: false, does: 'Its instance is ended for good. What is kept of it for inspection is in S3 first.' }
const CALL_OFF: NodeAction = { verb: 'Call off', operation: 'ReleaseNode', takesReason: false, does: 'What was asked for it and is not done yet is forgotten.' }

/** By what a node is: the server refuses what the fleet around it does not allow right now, with the reason. */
export function actionsOf(node: Pick<Node, 'NodeStatus' | 'Hold' | 'Request'>): NodeAction[] {
  if (node.Request !== undefined) return [CALL_OFF]
  switch (node.NodeStatus) {
    case 'assigned':
      return [DRAIN, REPLACE, REBOOT]
    case 'spare':
      return [HOLD, REPLACE, REBOOT]
    case 'held':
      return node.Hold === 'unreachable' ? [REPLACE] : [RELEASE, END]
    default:
      return []
  }
}

/** Codes of faults that no restart mends. */
const BROKEN = /\b(?:gpu_lost|gpu_ecc|disk_read_only)\b|fallen off the bus|\bXid (?:79|95)\b/i

/**
 * What is best done with a held node, by why it is held: the one source of the job page's advice and of what the node's dialog begins with.
 *
 * `verb`: of an action; undefined where the facts do not decide. `xid`: NVIDIA's number, where a GPU error is told. Source: NVIDIA, Xid Catalog.
 */
export function adviceOn(node: Pick<Node, 'NodeStatus' | 'Hold'> & Partial<Pick<Node, 'Reason'>>): { verb?: string; xid?: string } {
  const xid = /\bXid (\d+)/.exec(node.Reason ?? '')?.[1]
  if (!waitsForAPerson(node)) return { xid }
  return { verb: BROKEN.test(node.Reason ?? '') ? END.verb : node.Hold === 'person' ? RELEASE.verb : undefined, xid }
}

const HELD: Record<NonNullable<Node['Hold']>, string> = {
  unreachable: 'it is not heard; it goes on by itself once it is',
  distrusted: 'what it did speaks against it; it waits for a person',
  inspection: 'it failed, and is kept to be looked at; it waits for a person',
  person: 'a person wants it kept',
}

/** Nobody but a person ends this: one that is only not heard goes on by itself. */
export const waitsForAPerson = (node: Pick<Node, 'NodeStatus' | 'Hold'>): boolean => node.NodeStatus === 'held' && node.Hold !== undefined && node.Hold !== 'unreachable'

export interface Look {
  nodeId: string
  title: string
  text: string
}

/** As a table has them: the one that a link leads to, then those that are, the newest first, then those that were. */
export function arrangedNodes(living: readonly Node[], ended: readonly Node[], target?: Node): Node[] {
  const held = new Map([...(target ? [target] : []), ...ended, ...living].map((node) => [node.NodeId, node])) // what is newest of each
  const rank = (node: Node) => (node.NodeId === target?.NodeId ? 0 : node.NodeStatus === 'gone' ? 2 : 1)
  return [...held.values()].sort((a, b) => rank(a) - rank(b) || b.CreationTime - a.CreationTime)
}

/** Nodes that wait for a person, or on which something asked for is still to be done. */
export function toLookAt(nodes: readonly Node[]): Look[] {
  return nodes.flatMap((node) => {
    if (node.NodeStatus === 'held') return [{ nodeId: node.NodeId, title: `Held: ${node.Hold ? HELD[node.Hold] : 'why is not told'}`, text: sentence(node.Reason) }]
    if (node.Request !== undefined) return [{ nodeId: node.NodeId, title: `To be: ${words(node.Request)}`, text: sentence(node.RequestReason ?? '') }]
    return []
  })
}

/** What jobs' code can get at on these nodes that is not theirs, each sentence once, with the nodes that it is said of. */
export function exposures(nodes: readonly Pick<Node, 'NodeId' | 'NodeStatus' | 'Exposure'>[]): { text: string; nodeIds: string[] }[] {
  const found = new Map<string, string[]>()
  for (const { NodeId, NodeStatus, Exposure } of nodes) if (Exposure && NodeStatus !== 'gone') found.set(Exposure, [...(found.get(Exposure) ?? []), NodeId])
  return [...found].map(([text, nodeIds]) => ({ text: sentence(text), nodeIds }))
}

const NOTICES = new Set(['NoticeReceived', 'NodesToBeLeft'])

/** What AWS announced lately, newest first. */
export const noticesIn = (events: readonly Event[], most = 5): Event[] => events.filter((event) => NOTICES.has(event.Type)).toReversed().slice(0, most)

/** Agents of different versions: during an update, or one that was forgotten. */
export function versionsOf(nodes: readonly Pick<Node, 'AgentVersion' | 'NodeStatus'>[]): string {
  const counts = new Map<string, number>()
  for (const node of nodes) if (node.AgentVersion && node.NodeStatus !== 'gone') counts.set(node.AgentVersion, (counts.get(node.AgentVersion) ?? 0) + 1)
  return [...counts].sort().map(([version, number]) => `${version} on ${plural(number, 'node')}`).join(', ') || 'none has joined'
}
