/** The nodes of a fleet. The page's URL selects ended nodes (`?ended=1`) and one node (`#i-…`). */
import '@mantine/core/styles/Switch.css'
import { Button, Switch } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useMemo, useState } from 'react'
import { useLocation, useNavigate, useSearchParams } from 'react-router'

import { lazyWith } from '../api/pages'
import { nodeQuery, nodesQuery, useRole } from '../api/queries'
import type { Fleet, Node } from '../contract'
import { conditionLines } from '../model/conditions'
import { hook, nodeFigures, type NodeFigures } from '../model/figures'
import { bytes, count, sentence } from '../model/format'
import { actionsOf, arrangedNodes } from '../model/nodes'
import { FLEET } from '../words/fleets'
import { NODES } from '../words/nodes'
import { Ago, JobLink, Shown, Status, useIsStale } from './Basics'
import { Card } from './Card'
import { CopyId } from './CopyId'
import { Table } from './Table'

const NodeDialog = lazyWith(() => import('./NodeDialog'))

const PAGE = 500
const NODE_ID = /^i-[0-9a-f]+$/
const WORDS = FLEET.nodes

export function FleetNodes({ fleet }: { fleet: Fleet }) {
  const [search] = useSearchParams()
  const navigate = useNavigate()
  const { hash } = useLocation()
  const id = hash.slice(1)
  const withEnded = search.get('ended') === '1'
  const living = useQuery(nodesQuery(fleet.FleetName))
  const ended = useQuery({ ...nodesQuery(fleet.FleetName, true), enabled: withEnded })
  const alive = living.data?.find((node) => node.NodeId === id)
  const isUnknown = NODE_ID.test(id) && living.data !== undefined && alive === undefined
  const described = useQuery({ ...nodeQuery(id), enabled: isUnknown }).data
  const target = alive ?? (described?.FleetName === fleet.FleetName ? described : undefined)
  const nodes = useMemo(
    () => arrangedNodes(living.data ?? [], withEnded ? (ended.data ?? []) : [], target),
    [living.data, withEnded, ended.data, target],
  )
  const showEnded = (isShown: boolean) => {
    const next = new URLSearchParams(search)
    isShown ? next.set('ended', '1') : next.delete('ended')
    void navigate({ search: next.toString(), hash }, { replace: true })
  }
  const toggle = (
    <Switch
      size="xs"
      label={WORDS.withEnded}
      checked={withEnded}
      onChange={(event) => showEnded(event.currentTarget.checked)}
    />
  )
  return (
    <Card isFlush title={WORDS.title} actions={toggle}>
      <Shown query={withEnded ? ended : living}>
        {() => (nodes.length ? <NodeTable nodes={nodes} target={target} /> : <p className="dim empty">{WORDS.none}</p>)}
      </Shown>
    </Card>
  )
}

function NodeTable({ nodes, target }: { nodes: readonly Node[]; target?: Node }) {
  const { isAdmin } = useRole()
  const [chosen, setChosen] = useState<Node>()
  const columns = WORDS.columns
  const isStale = useIsStale()
  const reason = ({ Request, Reason }: Node) =>
    [Request ? sentence(NODES.requested(Request)) : '', sentence(Reason)].filter(Boolean).join(' ')
  const act = (node: Node) =>
    actionsOf(node).length > 0 && (
      <Button size="compact-sm" variant="default" aria-label={WORDS.actOn(node.NodeId)} onClick={() => setChosen(node)}>
        {WORDS.act}
      </Button>
    )
  return (
    <>
      <Table
        label={WORDS.title}
        page={PAGE}
        more={WORDS.more}
        rows={nodes.map((node) => ({ node, figures: nodeFigures(node, { isStale }) }))}
        keyOf={({ node }) => node.NodeId}
        rowOf={({ node }) => ({
          id: node.NodeId,
          className: node.NodeId === target?.NodeId ? 'target' : undefined,
        })}
        columns={[
          [columns.node, ({ node }) => <NodeCell {...node} />],
          [
            columns.status,
            ({ figures }) => <Status tone={figures.statusTone} word={figures.status} />,
            undefined,
            ({ figures }) => hook(figures, 'status'),
          ],
          [columns.agent, (row) => <Agent {...row} />],
          [columns.job, ({ node: { TrainingJobName: name } }) => (name ? <JobLink name={name} /> : '–'), 'name'],
          [columns.reason, ({ node }) => reason(node), 'reason'],
          [columns.address, ({ node }) => node.Address || '–', 'mono nowrap'],
          // EC2 has no topology for many instance types.
          nodes.some((node) => node.FailureDomain) && [
            columns.network,
            ({ node }) => node.FailureDomain ?? '–',
            'mono nowrap',
          ],
          [columns.memory, ({ node }) => (node.MemoryBytes ? bytes(node.MemoryBytes) : '–'), 'n'],
          [columns.since, ({ node }) => <Ago at={node.EndTime ?? node.CreationTime} />, 'moment'],
          isAdmin && [columns.act, ({ node }) => act(node), 'unnamed'],
        ]}
      />
      {chosen && <NodeDialog node={chosen} onClose={() => setChosen(undefined)} />}
    </>
  )
}

/** A node's id, above its image with the age of the image. */
function NodeCell({ NodeId, ImageId, ImageCreationTime: at }: Node) {
  return (
    <div>
      <CopyId id={NodeId} />
      {ImageId && (
        <div className="dim">
          {ImageId}
          {at !== undefined && (
            <>
              {WORDS.created} <Ago at={at} />
            </>
          )}
        </div>
      )}
    </div>
  )
}

function Agent({ node, figures }: { node: Node; figures: NodeFigures }) {
  const word = node.Connected && node.Warm ? WORDS.warm : figures.agent
  const refused = node.RefusedMessageCount + node.RefusedSessionCount
  return (
    <div>
      <span {...hook(figures, 'agent')}>
        {word === undefined || figures.agent === undefined ? '–' : <Status tone={figures.agentTone} word={word} />}
      </span>
      {refused > 0 && (
        <div className="dim">{WORDS.refused(count(node.RefusedMessageCount), count(node.RefusedSessionCount))}</div>
      )}
      {conditionLines(node.Conditions).map((line) => (
        <div key={line.key}>
          <Status tone="warn" word={line.title} title={line.text} />
        </div>
      ))}
      {node.Exposure && node.NodeStatus !== 'gone' && (
        <div>
          <Status tone="warn" word={WORDS.exposed} title={node.Exposure} />
        </div>
      )}
    </div>
  )
}
