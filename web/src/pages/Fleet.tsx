/** One fleet: its group, what differs from the contract, and its nodes. */
import { Button, NumberInput, Switch } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { Suspense, useMemo, useState } from 'react'
import { Link, useLocation, useNavigate, useParams, useSearchParams } from 'react-router'

import { call } from '../api/client'
import { eventsQuery, fleetsQuery, nodeQuery, nodesQuery, useRole } from '../api/queries'
import { part } from '../api/pages'
import type { Fleet, Node } from '../contract'
import { conditionLines } from '../model/conditions'
import { fleetFigures, hook, nodeFigures, shown } from '../model/figures'
import { changesOf, figuresOf, spares } from '../model/fleets'
import { bytes, count, dollars, plural, sentence } from '../model/format'
import { actionsOf, arrangedNodes, exposures, noticesIn, toLookAt } from '../model/nodes'
import { Ago, Empty, FactList, JobLink, NodeLink, Problem, Shown, Status, useStaleSeconds } from '../parts/Basics'
import { ConfirmByName } from '../parts/ConfirmByName'
import { EventList } from './JobTabs'

const NodeDialog = part(() => import('../parts/NodeDialog'))

export default function FleetPage() {
  const { name = '' } = useParams()
  useDocumentTitle(`Fleet ${name}, Everstep`)
  const query = useQuery(fleetsQuery)
  return (
    <Shown query={query}>
      {(fleets) => {
        const fleet = fleets.find((each) => each.FleetName === name)
        return fleet ? <Told fleet={fleet} /> : <Empty title={`There is no fleet named ${name}`} command="everstep fleets list" />
      }}
    </Shown>
  )
}

function Told({ fleet }: { fleet: Fleet }) {
  const { isAdmin } = useRole()
  const drift = fleet.Drift ?? []
  const figures = fleetFigures(fleet, { staleSeconds: useStaleSeconds() })
  return (
    <div className="stack">
      <div>
        <div className="dim">
          <Link to="/fleets">Fleets</Link>
        </div>
        <div className="row">
          <h1>{fleet.FleetName}</h1>
          <span {...hook(figures, 'status')}><Status tone={figures.statusTone} word={figures.status} title={fleet.Reason} /></span>
        </div>
        <p className="dim">{sentence(fleet.Reason ?? '')}</p>
        {isAdmin && fleet.FleetStatus === 'frozen' && <Unfreeze fleet={fleet} />}
      </div>
      {drift.length > 0 && (
        <section className="card problem tone-warn" role="status">
          <h2>The group is not as Everstep needs it</h2>
          <p>Nothing is ended until this is put right:</p>
          <ul>
            {drift.map((each) => (
              <li key={each}>{each}</li>
            ))}
          </ul>
        </section>
      )}
      <Look fleet={fleet} />
      <section className="card">
        <FactList
          facts={[
            ['Nodes', `${shown(figures, 'nodes')} of ${shown(figures, 'desiredNodes')} desired, at most ${count(fleet.MaxNodeCount)}`, hook(figures, 'nodes')],
            ['Connected', shown(figures, 'connectedNodes'), hook(figures, 'connectedNodes')],
            ['Spares wanted', spares(fleet)],
            ['Kept when idle', count(fleet.MinNodeCount)],
            ['Group', <code key="group">{fleet.AutoScalingGroupName}</code>],
            ['Instances', `${fleet.InstanceType || 'not known'}, ${fleet.AvailabilityZone || 'zone not known'}`],
            ['Price', fleet.PriceUsdPerHour === undefined ? 'not known' : `${dollars(fleet.PriceUsdPerHour)}/h a node, ${shown(figures, 'priceUsdPerHour')}/h now`, hook(figures, 'priceUsdPerHour')],
            ['Cost of its jobs', figures.costUsd === undefined ? 'not known' : shown(figures, 'costUsd'), hook(figures, 'costUsd')],
            ['ETTR of its jobs', shown(figures, 'ettrRatio'), hook(figures, 'ettrRatio')],
            ['A recovery takes', `${shown(figures, 'mttrSeconds')} on average`, hook(figures, 'mttrSeconds')],
            ['Incidents', shown(figures, 'incidents'), hook(figures, 'incidents')],
            ['Lost nodes', shown(figures, 'lostNodes'), hook(figures, 'lostNodes')],
            ['Failed instances', fleet.HoldFailedInstances ? 'are kept for inspection' : 'are ended'],
            ['Drills', fleet.AllowDrills ? <Link key="drills" to="/drills">allowed</Link> : 'not allowed'],
            ['Created', <Ago key="created" at={fleet.CreationTime} />],
          ]}
        />
        {isAdmin && fleet.FleetStatus !== 'deleting' && <Change key={JSON.stringify(figuresOf(fleet))} fleet={fleet} />}
      </section>
      <Nodes fleet={fleet} />
      <div>
        <h2>Events</h2>
        <EventList scope={{ fleet: fleet.FleetName }} most={40} />
      </div>
    </div>
  )
}

/** Said by a person of a fleet most of which is silent: it ends what is not heard, so its name is asked for. */
function Unfreeze({ fleet }: { fleet: Fleet }) {
  const client = useQueryClient()
  const [isAsking, setAsking] = useState(false)
  return (
    <>
      <Button size="xs" color="red" variant="outline" onClick={() => setAsking(true)}>
        Unfreeze
      </Button>
      <ConfirmByName
        name={fleet.FleetName}
        verb="Unfreeze"
        opened={isAsking}
        onClose={() => setAsking(false)}
        onConfirm={async () => {
          await call('UnfreezeFleet', { FleetName: fleet.FleetName })
          await client.invalidateQueries()
        }}
      >
        <p>Everstep has stopped acting because most of the fleet is silent. With this you say: who is silent is gone. Their jobs are recovered on other nodes, and their instances are ended.</p>
        <p>It holds until most of the fleet is heard again. Where the group differs from what Everstep needs, the fleet stays frozen until that is put right.</p>
      </ConfirmByName>
    </>
  )
}

const MOST_NAMED = 4

/** Held nodes, what was asked for and is still to be done, what jobs' code can get at that is not theirs, and what AWS announced: what somebody came for who opens a fleet. */
function Look({ fleet }: { fleet: Fleet }) {
  const nodes = useQuery(nodesQuery(fleet.FleetName)).data ?? []
  const events = useQuery(eventsQuery({ fleet: fleet.FleetName })).data?.events ?? []
  const held = toLookAt(nodes)
  const notices = noticesIn(events)
  const exposed = exposures(nodes)
  if (!held.length && !notices.length && !exposed.length) return null
  return (
    <section className="card">
      <h2>What needs a look</h2>
      <ul className="plain looks">
        {held.map((each) => (
          <li key={each.nodeId}>
            <NodeLink id={each.nodeId} fleet={fleet.FleetName} /> <strong>{each.title}.</strong> <span className="dim">{each.text}</span>
          </li>
        ))}
        {exposed.map(({ text, nodeIds }) => (
          <li key={text}>
            {nodeIds.length <= MOST_NAMED ? nodeIds.map((id) => <span key={id}><NodeLink id={id} fleet={fleet.FleetName} /> </span>) : <>{plural(nodeIds.length, 'node')} </>}
            <strong>Exposed to the code of jobs.</strong> <span className="dim">{text}</span>
          </li>
        ))}
        {notices.map((event) => (
          <li key={event.EventId}>
            <Ago at={event.Time} /> {event.NodeId && <NodeLink id={event.NodeId} fleet={fleet.FleetName} />} <span className="dim">{sentence(event.Message)}</span>
          </li>
        ))}
      </ul>
    </section>
  )
}

function Change({ fleet }: { fleet: Fleet }) {
  const client = useQueryClient()
  const [typed, setTyped] = useState(figuresOf(fleet))
  const [error, setError] = useState<unknown>()
  const changes = changesOf(fleet, typed)
  const isCounted = fleet.SparePolicy === undefined
  const isMissing = typed.least === '' || (isCounted && typed.spares === '')
  return (
    <form
      className="row"
      style={{ alignItems: 'end', marginTop: 14 }}
      onSubmit={(event) => {
        event.preventDefault()
        setError(undefined)
        call('UpdateFleet', { FleetName: fleet.FleetName, ...changes }).then(() => client.invalidateQueries(), setError)
      }}
    >
      <NumberInput label="Spares" size="xs" w={110} min={0} allowDecimal={false} value={typed.spares} onChange={(value) => setTyped({ ...typed, spares: value })} />
      <NumberInput label="Kept when idle" size="xs" w={110} min={0} allowDecimal={false} value={typed.least} onChange={(value) => setTyped({ ...typed, least: value })} />
      <Button type="submit" size="xs" disabled={isMissing || !Object.keys(changes).length}>
        Change
      </Button>
      {!isCounted && <span className="dim">A number of spares ends what counts them by now: {spares(fleet)}.</span>}
      {error !== undefined && <Problem error={error} title="It was not changed" />}
    </form>
  )
}

const PAGE = 500
const NODE = /^i-[0-9a-f]+$/

function Nodes({ fleet }: { fleet: Fleet }) {
  const [search] = useSearchParams()
  const navigate = useNavigate()
  const { hash } = useLocation()
  const id = hash.slice(1)
  const isEnded = search.get('ended') === '1'
  const living = useQuery(nodesQuery(fleet.FleetName))
  const ended = useQuery({ ...nodesQuery(fleet.FleetName, true), enabled: isEnded })
  const query = isEnded ? ended : living
  const alive = living.data?.find((node) => node.NodeId === id)
  const described = useQuery({ ...nodeQuery(id), enabled: NODE.test(id) && living.data !== undefined && alive === undefined }).data
  const target = alive ?? (described?.FleetName === fleet.FleetName ? described : undefined)
  const nodes = useMemo(() => arrangedNodes(living.data ?? [], isEnded ? (ended.data ?? []) : [], target), [living.data, isEnded, ended.data, target])
  const show = (what: boolean) => {
    const next = new URLSearchParams(search)
    what ? next.set('ended', '1') : next.delete('ended')
    void navigate({ search: next.toString(), hash }, { replace: true })
  }
  const [shown, setShown] = useState(PAGE)
  const { isAdmin } = useRole()
  const [chosen, setChosen] = useState<Node>()
  return (
    <section className="card">
      <div className="row between">
        <h2>Nodes</h2>
        <Switch size="xs" label="Ended ones, too" checked={isEnded} onChange={(event) => show(event.currentTarget.checked)} />
      </div>
      <Shown query={query}>
        {() =>
          nodes.length ? (
            <div className="scroll">
              <table className="grid stacked">
                <thead>
                  <tr>
                    <th>Node</th>
                    <th>Status</th>
                    <th>Agent</th>
                    <th>Job</th>
                    <th>Reason</th>
                    <th>Address</th>
                    <th className="n">Memory</th>
                    <th>Since</th>
                    {isAdmin && <th><span className="visually-hidden">Act</span></th>}
                  </tr>
                </thead>
                <tbody>
                  {nodes
                    .slice(0, shown)
                    .map((node) => ({ node, figures: nodeFigures(node) }))
                    .map(({ node, figures }) => (
                      <tr key={node.NodeId} id={node.NodeId} className={node.NodeId === target?.NodeId ? 'target' : undefined}>
                        <td className="mono" data-name="Node">{node.NodeId}</td>
                        <td data-name="Status" {...hook(figures, 'status')}><Status tone={figures.statusTone} word={figures.status} /></td>
                        <td data-name="Agent">
                          <span {...hook(figures, 'agent')}>{figures.agent === undefined ? '–' : <Status tone={figures.agentTone} word={node.Connected && node.Warm ? 'connected, warm' : figures.agent} />}</span>
                          {node.RefusedMessageCount + node.RefusedSessionCount > 0 && <div className="dim">{count(node.RefusedMessageCount)} messages, {count(node.RefusedSessionCount)} sessions refused</div>}
                          {conditionLines(node.Conditions).map((line) => <div key={line.key}><Status tone="warn" word={line.title} title={line.text} /></div>)}
                          {node.Exposure && node.NodeStatus !== 'gone' && <div><Status tone="warn" word="exposed to jobs" title={node.Exposure} /></div>}
                        </td>
                        <td data-name="Job">{node.TrainingJobName ? <JobLink name={node.TrainingJobName} /> : '–'}</td>
                        <td className="reason">{node.Request ? `To be: ${node.Request}. ` : ''}{node.Reason}</td>
                        <td className="mono" data-name="Address">{node.Address || '–'}</td>
                        <td className="n" data-name="Memory">{node.MemoryBytes ? bytes(node.MemoryBytes) : '–'}</td>
                        <td data-name="Since"><Ago at={node.EndTime ?? node.CreationTime} /></td>
                        {isAdmin && (
                          <td data-name="Act">
                            {actionsOf(node).length > 0 && (
                              <Button size="compact-xs" variant="default" aria-label={`Act on ${node.NodeId}`} onClick={() => setChosen(node)}>
                                Act…
                              </Button>
                            )}
                          </td>
                        )}
                      </tr>
                    ))}
                </tbody>
              </table>
            </div>
          ) : (
            <p className="dim">No node yet.</p>
          )
        }
      </Shown>
      {nodes.length > shown && (
        <Button variant="default" size="xs" onClick={() => setShown(shown + PAGE)}>
          Show {count(Math.min(PAGE, nodes.length - shown))} more of {count(nodes.length)}
        </Button>
      )}
      {chosen && (
        <Suspense fallback={null}>
          <NodeDialog node={chosen} onClose={() => setChosen(undefined)} />
        </Suspense>
      )}
    </section>
  )
}
